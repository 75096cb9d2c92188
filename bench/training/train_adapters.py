"""Trains the embedded model's LoRA adapters: `python -m bench.training.train_adapters --name german --out DIR`,
minutes on two cores.

PEFT makes and writes them. The text is that of the tasks with other answers (`answers.py`), and only answers are
learnt. The learning rate follows the clock, down to zero when `--minutes` are over; then held-out questions are asked,
and the card says how many answers were right.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.training.answers import MANNERS, Manner, drawn
from bench.training.data import END_OF_TEXT, TURN_END, TURN_START, answer_mask, render
from bench.training.descent import descend
from bench.training.evaluate import answers
from bench.training.folders import replaced
from graphllm.embedded import MODEL_DIR

SORTED = 16  # batches of samples that are sorted by length, so that little is padding
WARMUP = 0.03  # of the time
BASE = "graphllm/embedded/model"

CARD = """---
license: apache-2.0
language: {language}
base_model: {base}
library_name: peft
---
# {name}: a LoRA adapter of the embedded model

The model {about}. Rank {rank} on every linear layer, {kilobytes:.0f} KB in bf16, for `--lora-modules
{name}=DIR` or PEFT; trained in {steps} steps, {minutes:g} minutes, on {cores}:

    {command}

Held-out questions, answered greedily with PEFT in float32; an answer counts where it is right to the letter:

| task | questions | right |
| --- | ---: | ---: |
{rows}
"""


def batches(tokenizer: Any, manner: Manner, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids of chats [size, T], padded, and which of them the model is to say."""
    rng = Random(f"{seed} adapter")
    names, weights = list(manner.tasks), list(accumulate(manner.tasks.values()))
    marks = tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_START, TURN_END, "assistant"])
    while True:
        samples = [drawn(rng, manner, rng.choices(names, cum_weights=weights)[0]) for _ in range(SORTED * size)]
        rows = [tokenizer(render(s.conversation(), s.tools), add_special_tokens=False)["input_ids"] for s in samples]
        rows.sort(key=len)
        for at in rng.sample(range(SORTED), SORTED):
            part = [torch.tensor(row) for row in rows[at * size : (at + 1) * size]]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=marks[0])
            yield ids, answer_mask(ids, *marks) & (ids != marks[0])


def fit(model: Any, data: Iterator[tuple[Tensor, Tensor]], minutes: float, peak: float) -> int:
    """Trains for the minutes; returns the steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    start, step = time.monotonic(), 0
    for ids, spoken in data:
        done = (time.monotonic() - start) / (minutes * 60)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, done / WARMUP + 0.05) * (0.5 + 0.5 * math.cos(math.pi * done))
        said = spoken[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits[said].float(), ids[:, 1:][said])
        descend(loss, trained, optimizer)
        step += 1
        if step % 20 == 1:
            print(f"step {step:5}  {time.monotonic() - start:5.0f} s  loss {loss.item():.4f}", flush=True)
    return step


def measure(model: Any, tokenizer: Any, manner: Manner, count: int, seed: int) -> list[tuple[str, int, float]]:
    """By task: held-out questions, and the share of right answers."""
    rows = []
    for name in manner.tasks:
        rng = Random(f"{seed} {name}")
        drawings = (drawn(rng, manner, name, held_out=True) for _ in range(3 * count))
        samples = list({repr(s.messages): s for s in drawings}.values())[:count]
        said = answers(model, tokenizer, samples)
        wrong = [(s, a) for s, a in zip(samples, said, strict=True) if not s.accepts(a.text)]
        for sample, answer in wrong[:2]:
            print(f"{name}: {sample.messages[-1]['content']!r}: {answer.text!r}, not {sample.answer!r}", flush=True)
        rows.append((name, len(samples), 1 - len(wrong) / len(samples)))
    return rows


def save(model: Any, card: str, out: Path) -> None:
    """Writes PEFT's folder."""
    with replaced(out) as folder:
        model.bfloat16().save_pretrained(folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = BASE  # not where it lies on this machine
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (folder / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", choices=tuple(MANNERS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=5, help="of training")
    parser.add_argument("--rank", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="chats of a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--count", type=int, default=50, help="held-out questions a task, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from peft import LoraConfig, get_peft_model

    logging.getLogger("peft").setLevel(logging.ERROR)
    torch.manual_seed(args.seed)
    manner = MANNERS[args.name]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    base: Any = AutoModelForCausalLM.from_pretrained(  # of so few tokens, attention is fastest the plain way
        MODEL_DIR, dtype=torch.bfloat16, attn_implementation="eager"
    )
    given = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )  # fmt: skip
    model = get_peft_model(base, given)
    steps = fit(model, batches(tokenizer, manner, args.batch, args.seed), args.minutes, args.lr)
    model.eval().float()
    with torch.no_grad():  # what is shipped is what is measured
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    rows = measure(model, tokenizer, manner, args.count, args.seed + 1)
    mean = ("**mean over tasks**", sum(n for _, n, _ in rows), sum(share for *_, share in rows) / len(rows))
    told = ("name", "minutes", "rank", "batch", "lr", "count", "seed")
    card = CARD.format(
        name=args.name, about=manner.about, rank=args.rank, steps=steps, minutes=args.minutes,
        language="de" if args.name == "german" else "en", base=BASE,
        kilobytes=2 * sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e3,
        cores="one core" if (n := torch.get_num_threads()) == 1 else f"{n} cores",
        command="python -m bench.training.train_adapters --out DIR "
        + " ".join(f"--{n} {getattr(args, n)}" for n in told),
        rows="\n".join(f"| {name} | {n} | {share:.1%} |" for name, n, share in (mean, *rows)),
    )  # fmt: skip
    save(model, card, args.out)
    print(f"wrote {args.out}: {steps} steps, {mean[2]:.1%} right")


if __name__ == "__main__":
    main()
