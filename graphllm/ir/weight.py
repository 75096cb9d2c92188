"""Weight: what a model says about one of its parameters, as data. The weight plan is derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, by shape and by the checkpoint tensors it is made of.

    shape: of the finished parameter. hf: names of the checkpoint tensors, concatenated along dimension 0 in this order;
    ``{layer}`` stands for the layer index. A name may be a tuple: alternatives, the first one present is taken.
    segments: rows of each part when ``hf`` has several; for stacked experts (N, F, D) of 2-D parts, rows of (N * F, D).
    slice_rows: take rows [a, b) of the (single) source tensor as stored. transpose: the checkpoint stores the parts as
    [in, out]. tie: take the finished parameter of this name instead ("embed.tokens"); nothing is read. value: the
    parameter is computed, a flat tuple of numbers in row-major order.
    shard: how tensor parallelism divides it ("rows" = output split, "cols" = input split, None = copied).
    dtype: "model" (the artifact's dtype) or "float32".
    """

    shape: tuple[int, ...]
    hf: tuple[str | tuple[str, ...], ...] = ()
    segments: tuple[int, ...] = ()
    slice_rows: tuple[int, int] | None = None
    transpose: bool = False
    tie: str | None = None
    value: tuple[float, ...] | None = None
    shard: Literal["rows", "cols"] | None = None
    dtype: Literal["model", "float32"] = "model"
