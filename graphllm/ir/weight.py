"""Weight: what a model says about one of its parameters, as data. The weight plan is derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shard = Literal["output", "input", "vocab", "expert"]


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, by shape and by the checkpoint tensors it is made of.

    shape: of the finished parameter. sources: names of the checkpoint tensors, concatenated along dimension 0 in this
    order; ``{layer}`` stands for the layer index. A name may be a tuple: alternatives, the first one present is taken.
    segments: rows of each part when there are several sources, or one that holds several parts; for stacked experts
    (N, F, D) of 2-D parts, rows of (N * F, D). slice_rows: take rows [a, b) of the (single) source tensor as stored.
    transpose: the checkpoint stores the parts as [in, out]. encoding: the checkpoint stores every source in this
    registered encoding. tie: take the finished parameter of this name instead ("embed.tokens"); nothing is read. value:
    the parameter is computed, a flat tuple of numbers in row-major order. expr: an expression of
    `graphllm.weights.plan.expr` that makes it, for what the shorter forms do not say.

    shard: how tensor parallelism divides it: "output" makes a part of the outputs on each rank (dimension 0, each
    segment by itself), "input" takes a part of the inputs (the last dimension), "vocab" holds a part of the vocabulary
    (dimension 0), "expert" some of the experts; None is copied. expert_axis: the dimension that counts experts, if
    there is one. heads: of each segment, its number of heads, which are not cut. Heads of keys and values may be fewer
    than ranks; several ranks then have the same. dtype: "model" (the artifact's dtype) or "float32". exact:
    ``quantization`` does not change it, because it decides and does not only compute, as a router does.
    """

    shape: tuple[int, ...]
    sources: tuple[str | tuple[str, ...], ...] = ()
    segments: tuple[int, ...] = ()
    slice_rows: tuple[int, int] | None = None
    transpose: bool = False
    encoding: str | None = None
    tie: str | None = None
    value: tuple[float, ...] | None = None
    expr: object | None = None
    shard: Shard | None = None
    expert_axis: int | None = None
    heads: tuple[int, ...] = ()
    dtype: Literal["model", "float32"] = "model"
    exact: bool = False
