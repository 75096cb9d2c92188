"""Runs a Hugging Face checkpoint folder through its model file, op by op: what an executor must reproduce."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from graphllm.ir import Attn, Step
from graphllm.ir.registry import load_models
from graphllm.weights.checkpoint import Checkpoint
from graphllm.weights.loader import load_weights
from graphllm.weights.plan import make_plan

PAGE = 16


@torch.no_grad()
def generate(model_dir: Path, prompts: Sequence[Sequence[int]], n_tokens: int) -> tuple[list[Tensor], list[list[int]]]:
    """Greedy float32 decoding of all prompts as one ragged batch.

    Returns, for each prompt, the logits [V] after its last token, and the n_tokens drawn ones.
    """
    hf = json.loads((model_dir / "config.json").read_text())
    model = load_models()[hf["architectures"][0]]
    c = model.config(hf)
    kinds = model.kinds(c)
    weights = load_weights(make_plan(model, c, "float32"), Checkpoint.open(model_dir))
    embed, head = _unit(weights, "embed"), _unit(weights, "head")
    layers = [_unit(weights, f"layers.{i}") for i in range(len(kinds))]

    block_table, pages = _assign_pages([len(p) + n_tokens for p in prompts])
    caches = [torch.zeros(pages, 2, c.K, PAGE, c.E) for _ in kinds]
    new, done = [list(p) for p in prompts], [0] * len(prompts)
    prefill: list[Tensor] = []
    tokens: list[list[int]] = [[] for _ in prompts]
    for _ in range(n_tokens):
        step = _step(new, done, block_table)
        x_TD, shared = model.embed(c, embed, step)
        for kind, w, kv_cache in zip(kinds, layers, caches, strict=True):
            x_TD = model.layer(c, kind, w, x_TD, shared, step, kv_cache)
        logits_SV = model.head(c, head, x_TD, step)
        prefill = prefill or list(logits_SV)
        done = [d + len(n) for d, n in zip(done, new, strict=True)]
        new = [[t] for t in logits_SV.argmax(-1).tolist()]
        for drawn, n in zip(tokens, new, strict=True):
            drawn += n
    return prefill, tokens


def _unit(weights: Mapping[str, Tensor], unit: str) -> SimpleNamespace:
    return SimpleNamespace(**{k.removeprefix(unit + "."): v for k, v in weights.items() if k.startswith(unit + ".")})


def _assign_pages(lengths: Sequence[int]) -> tuple[Tensor, int]:
    """A block table with the pages of all sequences shuffled, and their number."""
    counts = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    return table, sum(counts)


def _step(new: Sequence[Sequence[int]], done: Sequence[int], block_table: Tensor) -> Step:
    """The batch in which sequence s, of which ``done[s]`` tokens are cached, runs the tokens ``new[s]``."""

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for n in new:
        starts.append(starts[-1] + len(n))
    lengths = [d + len(n) for d, n in zip(done, new, strict=True)]
    return Step(
        token_ids=ints([t for n in new for t in n]),
        positions=ints([d + i for d, n in zip(done, new, strict=True) for i in range(len(n))]),
        context_len=ints([length for length, n in zip(lengths, new, strict=True) for _ in n]),
        logit_rows=ints([end - 1 for end in starts[1:]]),
        attn=Attn(block_table, ints(starts), ints(lengths)),
    )
