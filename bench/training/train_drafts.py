"""Trains what drafts for a model: `python -m bench.training.train_drafts --method eagle3 --out DIR`.

Without --model it is the embedded one, and the text is generated chats as in `train`; with --model, any checkpoint that
transformers reads whose layers are Llama's, and --text, a file of text of the kind that it will write. The head learns
the model's own likeliest tokens, several drafts deep, on a GPU where there is one. The learning rate follows the clock,
down to zero when --minutes are over; then acceptance is measured on text that was not trained on; the card has it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from bench.training.data import CONTEXT, END_OF_TEXT, TURN_END, TURN_START, PackedChats, answer_mask, token_id
from bench.training.descent import descend
from bench.training.draft_heads import DraftModel, Eagle3, Head, Medusa, Seen
from graphllm.embedded import MODEL_DIR

ROW = 256  # tokens of a row of --text
COUNTED = 12  # batches whose tokens say which ones the head drafts
HELD_OUT = 8  # batches for the card
WARMUP = 0.03  # of the time
DECAY = 0.8  # weight of each further draft

CARD = """---
license: apache-2.0
language: en
base_model: {base}
---
# {title} for {base}

It drafts up to {count} tokens, of which the model keeps those that it would have said itself: see
`docs/draft-models.md`. {parameters:.2f} M parameters in bf16, {steps} steps in {minutes:.1f} minutes on one
{device}:

    {command}

On text that was not trained on, where the model speaks; a draft counts only where those before it are right:

| drafts right | share of places |
| ---: | ---: |
{rows}

That is {length:.2f} tokens for each step that verifies {count} drafts.
"""


def chats(folder: Path, batch_tokens: int, seed: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of generated chats, and where the model speaks. workers: processes that make them, 0 for this one."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    marks = [token_id(tokenizer, mark) for mark in (END_OF_TEXT, TURN_START, TURN_END, "assistant")]
    cuda = torch.cuda.is_available()
    made = PackedChats(file, max(batch_tokens, CONTEXT), seed)
    ahead = 4 if workers else None
    for batch in DataLoader(made, batch_size=None, num_workers=workers, prefetch_factor=ahead, pin_memory=cuda):
        ids = batch.to("cuda" if cuda else "cpu", non_blocking=True).long()
        yield ids, answer_mask(ids, *marks)


def text(folder: Path, file: Path, batch_tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a text in random order, again and again. An even seed takes the first nine tenths, an odd one the
    rest."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(file.read_text(), add_special_tokens=False).ids
    cut = len(ids) * 9 // 10
    part = torch.tensor(ids[cut:] if seed % 2 else ids[:cut])
    if len(part) <= ROW:
        raise SystemExit(f"--text: {file} has {len(ids)} tokens; give at least {12 * ROW}")
    g = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(part) - ROW, (max(batch_tokens // ROW, 1),), generator=g)
        rows = torch.stack([part[s : s + ROW] for s in starts.tolist()])
        yield rows, torch.ones_like(rows, dtype=torch.bool)


@torch.no_grad()
def look(model: Any, ids: Tensor) -> tuple[Seen, Tensor]:
    """What a head reads of the model, and the model's likeliest token at each place, given those before it."""
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    best = out.logits.argmax(-1)
    return (ids, out.hidden_states), torch.cat([ids[:, :1], best[:, :-1]], 1)


def targets(best: Tensor, spoken: Tensor, index: Tensor, offset: int, j: int) -> tuple[Tensor, Tensor]:
    """Of draft j at each place: the number among the head's tokens that it should have, -1 for none; and whether it is
    one that the model says."""
    at = offset + j
    wanted = torch.roll(best, -at, 1)
    counts = torch.roll(spoken, -at, 1)
    counts[:, -at:] = False
    return index[wanted], counts


def measure(head: Head, model: Any, batches: list[tuple[Tensor, Tensor]], index: Tensor, count: int) -> list[float]:
    """The share of places at which at least 1, 2 ... drafts are right."""
    right, places = torch.zeros(count), 0
    device = index.device
    for ids, spoken in batches:
        seen, best = look(model, ids.to(device))
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            logits = head.drafts(seen, count)
        wanted = [targets(best, spoken.to(device), index, head.offset, j) for j in range(count)]
        counted = torch.stack([c for _, c in wanted]).all(0)
        run = torch.ones_like(counted)
        for j, (found, (token, _)) in enumerate(zip(logits, wanted, strict=True)):
            run &= found.argmax(-1) == token
            # A draft is right where it is what the text goes on with, too: further drafts read the text.
            right[j] += (run & counted).sum().cpu()
        places += int(counted.sum())
    return [float(r) / places for r in right]


def fit(head: Any, model: Any, batches: Iterator[tuple[Tensor, Tensor]], index: Tensor, count: int, args: Any) -> int:
    """Trains for the minutes; returns the steps."""
    device = next(head.parameters()).device
    matrices, vectors = ([p for p in head.parameters() if (p.dim() > 1) is m] for m in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    start, step = time.monotonic(), 0
    for ids, spoken in batches:
        done = (time.monotonic() - start) / (args.minutes * 60)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, done / WARMUP + 0.05) * (0.5 + 0.5 * math.cos(math.pi * done))
        seen, best = look(model, ids.to(device))
        loss = torch.zeros((), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            drafts = head.drafts(seen, count)
        for j, logits in enumerate(drafts):
            wanted, counts = targets(best, spoken.to(device), index, head.offset, j)
            wanted = torch.where(counts, wanted, -1).flatten()
            told = cross_entropy(logits.float().flatten(0, 1), wanted, ignore_index=-1, reduction="sum")
            loss = loss + DECAY**j * told / (wanted >= 0).sum().clamp(min=1)
        descend(loss, head.parameters(), optimizer)
        step += 1
        if step % 20 == 1:
            print(f"step {step:5}  {time.monotonic() - start:5.0f} s  loss {loss.item():.4f}", flush=True)
    return step


def save(head: Head, kept: Tensor, count: int, card: str, out: Path) -> None:
    """Writes the Hugging Face folder."""
    out.mkdir(parents=True, exist_ok=True)
    config = head.config(count)
    tensors = {n: w.bfloat16().contiguous().cpu() for n, w in head.tensors().items()}
    if isinstance(head, Eagle3) and len(kept) != config["vocab_size"]:
        tensors["d2t"] = (kept - torch.arange(len(kept), device=kept.device)).cpu()
    if isinstance(head, Medusa) and len(kept) != config["vocab_size"]:
        tensors["token_map"] = kept.cpu()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = {n: v for n, v in config.items() if v is not None} | {"dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "README.md").write_text(card)
    for file in out.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("draft_model", "eagle3", "medusa"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model; the embedded one")
    parser.add_argument("--text", type=Path, help="text to train on; generated chats for the embedded model")
    parser.add_argument("--minutes", type=float, default=3, help="of training")
    parser.add_argument("--drafts", type=int, default=3, help="tokens that it learns to draft")
    parser.add_argument("--vocab", type=int, default=1536, help="tokens that a head drafts: the model's most frequent")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    processes = min(max((os.cpu_count() or 1) - 2, 0), 8)
    parser.add_argument("--workers", type=int, default=processes, help="processes that generate chats")
    args = parser.parse_args()
    if args.text is None and args.model != MODEL_DIR:
        parser.error("--text: give a file of text for a model of your own")
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model = model.to(device).eval().requires_grad_(False)

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        if args.text is None:
            return chats(args.model, args.batch_tokens, seed, args.workers)
        return text(args.model, args.text, args.batch_tokens, seed)

    V, train = model.config.vocab_size, batches(2 * args.seed)
    said = torch.zeros(V, dtype=torch.long, device=device)
    for ids, spoken in islice(train, COUNTED):
        said += torch.bincount(ids[spoken].to(device), minlength=V)
    kept = torch.arange(V, device=device)
    if args.method != "draft_model":
        kept = said.topk(min(args.vocab, V)).indices.sort().values
    index = torch.full((V,), -1, device=device)
    index[kept] = torch.arange(len(kept), device=device)
    head: Any
    if args.method == "eagle3":
        head = Eagle3(model, kept)
    else:
        head = Medusa(model, kept, args.drafts) if args.method == "medusa" else DraftModel(model)
    # A draft model learns one token ahead: its further drafts are the same ones, of places further on.
    steps = fit(head, model, train, index, 1 if args.method == "draft_model" else args.drafts, args)
    held_out = list(islice(batches(2 * args.seed + 1), HELD_OUT))
    shares = measure(head, model, held_out, index, args.drafts)
    told = {n: getattr(args, n) for n in ("method", "minutes", "drafts", "vocab", "batch_tokens", "lr", "seed")}
    options = " ".join(f"--{n.replace('_', '-')} {v}" for n, v in told.items())
    card = CARD.format(
        base="the embedded model" if args.model == MODEL_DIR else args.model.name,
        title={"eagle3": "An EAGLE-3 head", "medusa": "Medusa heads", "draft_model": "A draft model"}[args.method],
        count=args.drafts, parameters=sum(w.numel() for w in head.tensors().values()) / 1e6, steps=steps,
        minutes=args.minutes, device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        command=f"python -m bench.training.train_drafts --out DIR {options}",
        rows="\n".join(f"| {j} or more | {share:.1%} |" for j, share in enumerate(shares, 1)),
        length=1 + sum(shares),
    )  # fmt: skip
    save(head, kept, args.drafts, card, args.out)
    print(f"wrote {args.out}: {steps} steps, drafts right {', '.join(f'{s:.1%}' for s in shares)}")


if __name__ == "__main__":
    main()
