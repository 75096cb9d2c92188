"""Divide a weight plan among the ranks of a tensor-parallel group. One plan serves them all: slices go by the symbol
rank, which the loader knows. No torch."""

from __future__ import annotations

import dataclasses

from graphllm.config import ConfigError
from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan.division import Division, WeightPart
from graphllm.weights.plan.expert_slots import first_placement
from graphllm.weights.plan.expr import Concat, Decode, Expr, Pad, Reshape, Slice, Stack, walk
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.simplify import simplify


def shard_plan(plan: WeightPlan, degree: int, experts_apart: bool = False, redundant: int = 0) -> WeightPlan:
    """The plan of one rank's share, as the entries say: "output" divides each segment by itself, "input" the last
    dimension, "vocab" the rows, the last rank's share filled up with zeros, and "expert" the experts.

    A segment of heads that are fewer than ranks is copied, each head to as many ranks. experts_apart: whatever belongs
    to experts is divided by expert. redundant: slots of each layer for copies of experts. Raises ConfigError for what
    cannot be divided evenly, or in whole blocks of the encoding that a checkpoint stores it in.
    """
    if degree == 1:
        return plan
    if experts_apart:
        if all(entry.expert_axis is None for entry in plan):
            raise ConfigError("enable_expert_parallel: the model has no experts; leave it out")
        plan = WeightPlan(tuple(_with_copies(_by_expert(entry), degree, redundant) for entry in plan))
    return WeightPlan(tuple(_divided(entry, plan, degree) for entry in plan))


def share_experts(plan: WeightPlan, cores: int) -> WeightPlan:
    """The plan of one of several engine cores; ``rank`` is its number: some of the experts, and all else. Raises
    ConfigError."""
    if all(entry.expert_axis is None for entry in plan):
        raise ConfigError("enable_expert_parallel: the model has no experts; leave it out")
    for entry in plan:
        if entry.expert_axis is not None and (experts := entry.shape[entry.expert_axis]) % cores:
            raise ConfigError(
                f"data_parallel_size is {cores}: the {experts} experts of a layer are no multiple of it; use a divisor"
            )
    return WeightPlan(tuple(e if e.expert_axis is None else _divided(_by_expert(e), plan, cores) for e in plan))


def on_first_rank(entry: Entry, degree: int) -> Entry:
    """The same parameter on rank 0, zeros on the others: for what is added to a sum over the ranks."""
    rows = entry.shape[0]
    own = Slice(Pad(entry.expr, 0, 0, (degree - 1) * rows), 0, 0, rows, rows)
    return dataclasses.replace(entry, expr=own)


def _by_expert(entry: Entry) -> Entry:
    return entry if entry.expert_axis is None else dataclasses.replace(entry, shard="expert")


def _with_copies(entry: Entry, degree: int, redundant: int) -> Entry:
    """The experts of a layer, and some again, as `first_placement` says."""
    axis = entry.expert_axis
    if not redundant or axis is None or not entry.name.startswith("layers."):  # experts of drafts stay where they are
        return entry
    experts = entry.shape[axis]
    if (experts + redundant) % degree:
        raise ConfigError(
            f"num_redundant_experts is {redundant}: with the {experts} experts of a layer that is no multiple of "
            f"tensor_parallel_size, {degree}; use {-experts % degree} or a multiple of {degree} more"
        )
    placement = first_placement(experts, redundant)
    if isinstance(entry.expr, Stack):
        expr: Expr = Stack(tuple(entry.expr.parts[expert] for expert in placement))
    elif any(isinstance(e, Decode) for e in walk(entry.expr)):
        raise ConfigError(
            f"num_redundant_experts is {redundant}: the checkpoint stores {entry.name} of all experts as one encoded "
            "tensor, which can have no copies; use 0"
        )
    else:
        expr = Concat(tuple(Slice(entry.expr, axis, expert, expert + 1) for expert in placement), axis)
    shape = (*entry.shape[:axis], len(placement), *entry.shape[axis + 1 :])
    return dataclasses.replace(entry, shape=shape, expr=simplify(expr))


def _divided(entry: Entry, plan: WeightPlan, degree: int) -> Entry:
    if entry.tie:
        owner = plan[entry.tie]
        if entry.shard != ("vocab" if owner.shard == "vocab" else None):
            how = 'shard must be "vocab", too' if owner.shard == "vocab" else "which says how it is divided"
            raise ValueError(f"{entry.name}: tied to {entry.tie}, {how}, and shard is {entry.shard!r}")
        divided = _divided(owner, plan, degree)
        return dataclasses.replace(entry, shape=divided.shape, shard=owner.shard, division=divided.division)
    if entry.shard is None:
        return entry
    if entry.shard == "vocab":
        return _vocabulary(entry, degree)
    dim, segments, heads = _cut(entry)
    shares = [_share(entry, n, h, degree) for n, h in zip(segments, heads, strict=True)]
    expr = _of_segments(entry.expr, dim, shares)
    shape = (*entry.shape[:dim], sum(share.each for share in shares), *entry.shape[dim + 1 :])
    local = entry.segments
    if entry.shard == "output" and local:
        lengths = [share.each for share in shares]
        local = tuple(lengths * (len(local) // len(lengths)))
    _check_blocks(entry, expr, degree)
    division = Division(dim, tuple(shares))
    return dataclasses.replace(entry, shape=shape, expr=expr, segments=local, division=division, undivided=entry.expr)


def _share(entry: Entry, length: int, heads: int, degree: int) -> WeightPart:
    """What a rank has of a segment. heads: what the segment is of, 0 for single entries."""
    if heads and degree % heads == 0:
        return WeightPart(length, length // heads, degree // heads)
    if (heads or length) % degree:
        what = f"{heads} heads" if heads else f"{length} entries"
        raise ConfigError(f"tensor_parallel_size is {degree}: {entry.name} has {what} to divide; use a divisor of it")
    return WeightPart(length, length // degree, 1)


def _of_segments(expr: Expr, dim: int, shares: list[WeightPart]) -> Expr:
    """A rank's share of each segment, one after the other."""
    segments = [share.length for share in shares]
    parts: list[Expr] = []
    at = 0
    for length, each, same in shares:
        parts.append(Slice(Slice(expr, dim, at, at + length), dim, 0, each, each, same))
        at += length
    divided = simplify(Concat(tuple(parts), dim))
    if len(segments) == 1 or len(set(segments)) > 1 or not _is_read_whole(divided):
        return divided
    # Where the segments are a dimension of the stored tensor, one slice of all of them reads less.
    _, each, same = shares[0]
    before, after = expr.shape[:dim], expr.shape[dim + 1 :]
    apart = Reshape(expr, (*before, len(segments), segments[0], *after))
    cut = Slice(apart, dim + 1, 0, each, each, same)
    return simplify(Reshape(simplify(cut), (*before, len(segments) * each, *after)))


def _is_read_whole(expr: Expr) -> bool:
    """Whether there are slices that cannot come down to what is stored."""
    return any(isinstance(e, Slice) and isinstance(e.part, Reshape) for e in walk(expr))


def _check_blocks(entry: Entry, expr: Expr, degree: int) -> None:
    """Raises ConfigError where a share of an encoded matrix that is kept so does not begin and end at its blocks: it
    would have to be decoded."""
    for e in walk(expr):
        if isinstance(e, Slice) and isinstance(e.part, Decode) and e.per_rank and _is_kept(entry, e.part.encoding):
            block = encoding_of(e.part.encoding).block[e.dim]
            extent = e.part.shape[e.dim]
            remedy = "a divisor" if entry.expert_axis is None else "a divisor, or enable_expert_parallel"
            raise ConfigError(
                f"tensor_parallel_size is {degree}: {entry.name} is stored as {e.part.encoding} in blocks of {block} "
                f"entries, and {extent} / {degree} is no multiple of them; use {remedy}"
            )


def _is_kept(entry: Entry, name: str) -> bool:
    """Whether an op reads such a parameter as it is stored, or repacked; others are decoded while they are loaded."""
    found = [encoding_of(n) for n in (name, *(n for n, _ in encoding_of(name).repacked))]
    return any((e.op if entry.expert_axis is None else e.moe_op) is not None for e in found)


def _vocabulary(entry: Entry, degree: int) -> Entry:
    rows = -(-entry.shape[0] // degree)
    shape = (rows, *entry.shape[1:])
    division = Division(0, (WeightPart(entry.shape[0], rows, 1),))
    missing = degree * rows - entry.shape[0]
    stored = [e.encoding for e in walk(entry.expr) if isinstance(e, Decode) and _is_kept(entry, e.encoding)]
    if missing and stored:
        raise ConfigError(
            f"tensor_parallel_size is {degree}: {entry.name} is stored as {stored[0]} and has {entry.shape[0]} rows; "
            "use a divisor of it"
        )
    whole = Pad(entry.expr, 0, 0, missing) if missing else entry.expr
    expr = simplify(Slice(whole, 0, 0, rows, rows))
    _check_blocks(entry, expr, degree)
    return dataclasses.replace(entry, shape=shape, expr=expr, division=division, undivided=entry.expr)


def _cut(entry: Entry) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The dimension that is divided, the lengths of what is divided by itself, and the heads of each."""
    experts = entry.expert_axis
    if entry.shard == "expert":
        if experts is None:
            raise ValueError(f'{entry.name}: shard="expert" needs expert_axis')
        return experts, (entry.shape[experts],), (0,)
    if entry.shard == "input":
        return len(entry.shape) - 1, (entry.shape[-1],), (0,)
    dim = 0 if experts is None else experts + 1
    total = entry.shape[dim]
    segments = entry.segments or (total,)
    if experts is not None:  # they list the parts of every expert
        segments = segments[: len(segments) // entry.shape[experts]] or (total,)
    if sum(segments) != total:
        raise ValueError(f"{entry.name}: segments {entry.segments} do not add up to {total}")
    return dim, segments, entry.heads or (0,) * len(segments)
