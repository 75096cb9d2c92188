"""Ops of recipes that stay opaque while a module is traced: attention without its cache, and rotary tables in the form
that a module hands to its layers. `Recipe.run` puts our ops in their places."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("graphllm_leaf", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, float scale, int window=0, float softcap=0.0, Tensor? sinks=None, "
    'bool causal=True, str state="kv") -> Tensor'
)
_library.define("spread(Tensor table, str form, bool exact=False) -> Tensor")
_library.define("rope_table(Tensor positions, Tensor inv_freq, float scale=1.0) -> (Tensor, Tensor)")


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
    causal: bool = True, state: str = "kv",
) -> Tensor:  # fmt: skip
    """Attention of the step's tokens over the layer's cache: q [.., T, H, E], k [.., T, K, E], v [.., T, K, G] give
    [.., T, H, G]. scale, window, softcap, sinks [H]: as in `graphllm.ops.attention.paged_attention.operands.Scores`.
    causal: tokens see no later ones. state: the name of the layer's state with its keys and values."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _spread(table: Tensor, form: str, exact: bool = False) -> Tensor:
    """A table of cosines or sines [.., F], as a module has it. form: "halves": twice, one after the other; "pairs":
    each number twice; "plain": as it is. exact: it stays float32, else it is rounded to the model's dtype."""
    width = table.shape[-1] * (1 if form == "plain" else 2)
    return table.new_empty(*table.shape[:-1], width, dtype=torch.float32 if exact else torch.bfloat16)


def _rope_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The op rope_table over positions with any leading dimensions: two tables [.., T, F], float32."""
    table = inv_freq.new_empty(*positions.shape, inv_freq.shape[0])
    return table, torch.empty_like(table)


for _name, _fake in (("attention", _attention), ("spread", _spread), ("rope_table", _rope_table)):
    torch.library.register_fake(f"graphllm_leaf::{_name}", _fake, lib=_library)
attention = torch.ops.graphllm_leaf.attention.default
spread = torch.ops.graphllm_leaf.spread.default
rope_table = torch.ops.graphllm_leaf.rope_table.default


def spread_out(table: Tensor, form: str, exact: bool = False, *, dtype: torch.dtype) -> Tensor:
    """What `spread` stands for, in a model of a dtype."""
    if form == "halves":
        table = torch.cat((table, table), -1)
    elif form == "pairs":
        table = table.repeat_interleave(2, -1)
    return table if exact else table.to(dtype)
