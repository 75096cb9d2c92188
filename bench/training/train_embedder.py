"""Trains the embedded sentence embedder: `python -m bench.training.train_embedder --out DIR`, minutes on one core.

A BERT of four layers reads pairs of sentences of one meaning (`paraphrases.py`); each is to find its partner among the
others of the batch. The learning rate follows the clock, down to zero when `--minutes` are over. Then held-out
paraphrases are searched for, and the card says how many were found, beside TF-IDF over words.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoTokenizer, BertConfig, BertModel

from bench.training.descent import descend
from bench.training.folders import replaced
from bench.training.paraphrases import HELD_OUT_WAYS, batch, held_out_pairs
from graphllm.embedded import MODEL_DIR

WARMUP = 0.05  # of the time
TEMPERATURE = 0.05
MAX_LEN = 256
COPIED = ("tokenizer.json", "tokenizer_config.json")

CARD = """---
license: apache-2.0
language: en
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---
# The embedded sentence embedder

A BERT of {layers} layers, width {width}, {parameters:.1f} M parameters in bf16, with the tokenizer of the embedded
model; the mean of a text's tokens, of length 1. Trained on paraphrases that it generates, in {steps} steps of {batch}
pairs, {minutes:g} minutes, on {cores}:

    {command}

It knows short English sentences of everyday topics, and is there to try things with, not to build a search on.

Retrieval: {count} held-out sentences, each searched for by its paraphrase among all {count}. Neither their meanings nor
the {ways} ways of saying each topic that they are made with were in training; topics and words were.

| | recall@1 | recall@10 | MRR |
| --- | ---: | ---: | ---: |
{rows}
"""


def encode(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Vectors [texts, width] of length 1: the means of the tokens' states."""
    ids = tokenizer(texts, padding=True, truncation=True, max_length=MAX_LEN, return_tensors="pt")
    states = model(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"]).last_hidden_state
    mask = ids["attention_mask"].unsqueeze(-1)
    return normalize((states.float() * mask).sum(1) / mask.sum(1), dim=1)


def fit(model: Any, tokenizer: Any, minutes: float, size: int, peak: float, seed: int) -> int:
    """Trains for the minutes; returns the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    rng, start, step = Random(f"{seed} embedder"), time.monotonic(), 0
    target = torch.arange(size)
    while (done := (time.monotonic() - start) / (minutes * 60)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, done / WARMUP + 0.02) * (0.5 + 0.5 * math.cos(math.pi * done))
        first, second = map(list, zip(*batch(rng, size), strict=True))
        vectors = encode(model, tokenizer, first + second)
        products = vectors[:size] @ vectors[size:].T / TEMPERATURE
        loss = (cross_entropy(products, target) + cross_entropy(products.T, target)) / 2
        descend(loss, model.parameters(), optimizer)
        step += 1
        if step % 50 == 1:
            print(f"step {step:5}  {time.monotonic() - start:5.0f} s  loss {loss.item():.4f}", flush=True)
    return step


def tf_idf(texts: list[str], corpus: list[str]) -> Tensor:
    """Vectors of length 1 [texts, words of the corpus]: counts of lower-case words by how rare they are there."""
    split = [re.findall(r"\w+", text.lower()) for text in corpus]
    places = Counter(word for document in split for word in set(document))
    columns = {word: column for column, word in enumerate(places)}
    vectors = torch.zeros(len(texts), len(columns))
    for row, text in zip(vectors, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()):
            if word in columns:
                row[columns[word]] += math.log((1 + len(corpus)) / (1 + places[word])) + 1
    return normalize(vectors, dim=1)


def retrieval(queries: Tensor, documents: Tensor) -> tuple[float, float, float]:
    """recall@1, recall@10 and the mean reciprocal rank of each query's own document; of equals, the worst place."""
    products = queries @ documents.T
    ranks = (products >= products.diagonal().unsqueeze(1)).sum(1).float()
    return (ranks <= 1).float().mean().item(), (ranks <= 10).float().mean().item(), (1 / ranks).mean().item()


@torch.no_grad()
def measure(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> dict[str, tuple[float, float, float]]:
    queries, documents = map(list, zip(*pairs, strict=True))
    return {
        "this model": retrieval(encode(model, tokenizer, queries), encode(model, tokenizer, documents)),
        "TF-IDF over words": retrieval(tf_idf(queries, documents), tf_idf(documents, documents)),
    }


def save(model: Any, card: str, out: Path) -> None:
    """Writes the folder of sentence-transformers."""
    with replaced(out) as folder:
        model.bfloat16().save_pretrained(folder)
        for name in COPIED:
            shutil.copy(MODEL_DIR / name, folder / name)
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds.items())
        ]
        (folder / "1_Pooling").mkdir()
        written = {
            "modules.json": modules,
            "1_Pooling/config.json": {
                "word_embedding_dimension": model.config.hidden_size,
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": True,
            },
            "sentence_bert_config.json": {"max_seq_length": MAX_LEN, "do_lower_case": False},
        }
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        (folder / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=4, help="of training")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--count", type=int, default=1000, help="held-out pairs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    config = BertConfig(
        vocab_size=4096, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=MAX_LEN, type_vocab_size=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )  # fmt: skip
    model: Any = BertModel(config, add_pooling_layer=False)
    steps = fit(model.train(), tokenizer, args.minutes, args.batch, args.lr, args.seed)
    model.eval()
    with torch.no_grad():  # what is shipped is what is measured
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    found = measure(model, tokenizer, held_out_pairs(args.count, args.seed + 1))
    told = ("minutes", "batch", "lr", "count", "seed")
    card = CARD.format(
        layers=config.num_hidden_layers, width=config.hidden_size, steps=steps, batch=args.batch, minutes=args.minutes,
        count=args.count, ways=HELD_OUT_WAYS, parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        cores="one core" if (n := torch.get_num_threads()) == 1 else f"{n} cores",
        command="python -m bench.training.train_embedder --out DIR "
        + " ".join(f"--{n} {getattr(args, n)}" for n in told),
        rows="\n".join(f"| {name} | {a:.1%} | {b:.1%} | {c:.3f} |" for name, (a, b, c) in found.items()),
    )  # fmt: skip
    save(model, card, args.out)
    print(f"wrote {args.out}: {steps} steps, {found}")


if __name__ == "__main__":
    main()
