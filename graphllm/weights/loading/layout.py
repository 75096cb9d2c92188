"""One block of memory that holds all parameters, and which bytes of files fill it: for weights that loading only moves.
No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.dtypes import BY_TAG, ITEMSIZE
from graphllm.weights.plan.expr import Concat, Expr, Reshape, Stack, Values
from graphllm.weights.plan.match import check_checkpoint, tensor_of
from graphllm.weights.plan.plan import WeightPlan
from graphllm.weights.plan.simplify import Region, at_rank, region_of, simplify

_ALIGN = 512  # bytes, as torch aligns what it allocates on a GPU


class _MoreError(Exception):
    """Loading does more than to move bytes."""


class TensorPlace(NamedTuple):
    """A parameter's: its first byte in the block."""

    at: int
    shape: tuple[int, ...]
    dtype: str


class FileCopy(NamedTuple):
    """So many bytes of a file that belong into the block from ``at`` on."""

    file: Path
    offset: int
    nbytes: int
    at: int


class BlockLayout(NamedTuple):
    """nbytes: of the block. places: by the names of parameters; those that share memory have the same one. moves: in no
    order. constants: bytes by where they begin. What neither writes is zero."""

    nbytes: int
    places: Mapping[str, TensorPlace]
    moves: tuple[FileCopy, ...]
    constants: Mapping[int, bytes]


def checkpoint_layout(plan: WeightPlan, checkpoint: Checkpoint) -> BlockLayout | None:
    """Of rank 0 of 1; None where loading does more than to move bytes. Raises WeightError where `check_checkpoint`
    does."""
    check_checkpoint(plan, checkpoint)
    places: dict[str, TensorPlace] = {}
    moves: list[FileCopy] = []
    constants: dict[int, bytes] = {}
    end = 0
    try:
        for entry in plan:
            if entry.tie:
                continue
            places[entry.name], expr = TensorPlace(end, entry.shape, entry.dtype), simplify(at_rank(entry.expr, 0))
            if isinstance(expr, Values):
                constants[end] = _bytes_of(expr, entry.dtype)
            else:
                moves += _moves(expr, end, entry.dtype, checkpoint)
            end += -(-entry.nbytes // _ALIGN) * _ALIGN
    except _MoreError:
        return None
    shared = {entry.name: places[entry.tie] for entry in plan if entry.tie}
    return BlockLayout(end, {**places, **shared}, tuple(moves), constants)


def baked_layout(file: Path, tensors: Mapping[str, Mapping[str, Any]]) -> BlockLayout:
    """Of baked weights. tensors: their table, see `graphllm.weights.loading.baked`."""
    starts: dict[int, int] = {}  # in the block, by offsets in the file
    moves: list[FileCopy] = []
    end = 0
    for stored in tensors.values():
        if stored["offset"] not in starts:
            starts[stored["offset"]] = end
            moves.append(FileCopy(file, stored["offset"], stored["nbytes"], end))
            end += -(-stored["nbytes"] // _ALIGN) * _ALIGN
    places = {n: TensorPlace(starts[s["offset"]], tuple(s["shape"]), s["dtype"]) for n, s in tensors.items()}
    return BlockLayout(end, places, tuple(moves), {})


def _bytes_of(expr: Values, dtype: str) -> bytes:
    if dtype not in ("float64", "float32", "int64", "int32"):
        raise _MoreError
    return np.array(expr.values, np.float64).astype(dtype).tobytes()


def _moves(expr: Expr, at: int, dtype: str, checkpoint: Checkpoint) -> Iterator[FileCopy]:
    """What makes the expression, in row-major order, from that place on."""
    if (region := region_of(expr)) is not None:
        yield _move(region, at, dtype, checkpoint)
    elif isinstance(expr, Stack) or (isinstance(expr, Concat) and expr.dim == 0):
        for part in expr.parts:
            yield from _moves(part, at, dtype, checkpoint)
            at += math.prod(part.shape) * ITEMSIZE[dtype]
    elif isinstance(expr, Reshape):
        yield from _moves(expr.part, at, dtype, checkpoint)
    else:
        raise _MoreError


def _move(region: Region, at: int, dtype: str, checkpoint: Checkpoint) -> FileCopy:
    """Of the box of a tensor, which must be one stretch of its bytes."""
    name = tensor_of(region.read, checkpoint)
    assert name is not None
    info, size = checkpoint.tensors[name], ITEMSIZE[dtype]
    shape, first = region.within(info.shape)
    cut = (d for d, (n, whole) in enumerate(zip(shape, info.shape, strict=True)) if n != whole)
    if info.dtype not in BY_TAG or BY_TAG[info.dtype].name != dtype or any(math.prod(shape[:d]) != 1 for d in cut):
        raise _MoreError
    return FileCopy(info.file, info.offset + first * size, math.prod(shape) * size, at)
