"""What GGUF files have in place of a checkpoint's numbers, made into these by weight expressions. No torch.

The config.json of a file names the steps of each tensor (`graphllm.weights.checkpoint.gguf.family.Change`). A step says
which shapes its parts have, and makes the tensor of them. What a model makes of the tensor often undoes a step again;
then both are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from graphllm.weights.plan.expr import UNDONE, Concat, Each, Expr, Permute, Read, Reshape, Slice, Stack, map_parts

Shape = tuple[int, ...]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, the first one in a name


class _Step(NamedTuple):
    """shapes(shape, count, *sizes): of the parts, of which there are ``count``, for a tensor of that shape.
    make(parts, shape, *sizes): the tensor."""

    shapes: Callable[..., Sequence[Shape]]
    make: Callable[..., Expr]


def changed(expr: Expr, changes: Mapping[str, Any], stored: Mapping[str, Any]) -> Expr:
    """An expression over a checkpoint's tensors as one over those of a GGUF file. changes: of its config.json. stored:
    the file's tensors, by a checkpoint's names; one that is there as it is, of several parts, is taken."""
    if not isinstance(expr, Read):
        return map_parts(expr, lambda part: changed(part, changes, stored))
    for source in expr.sources:
        layer = _NUMBER.search(source)
        change = changes.get(_NUMBER.sub("{layer}", source, count=1))
        if change is None or (change["parts"] and source in stored):
            continue
        steps = [(_STEPS[name], sizes) for name, *sizes in change["steps"]]
        names = _names(change, source, layer[0] if layer else "")
        if not change["parts"] and source not in stored:
            continue
        return _made(expr, names, steps)
    return expr


def _names(change: Mapping[str, Any], source: str, layer: str) -> list[str]:
    """Of the parts: of each expert those that the change names."""
    if not change["parts"]:
        return [source]
    names = [name.replace("{layer}", layer) for name in change["parts"]]
    if "{expert}" not in names[0]:
        return names
    return [name.replace("{expert}", str(i)) for i in range(change["steps"][0][1]) for name in names]


def _made(read: Read, names: Sequence[str], steps: Sequence[tuple[_Step, list[int]]]) -> Expr:
    shapes = [read.stored]  # of what the last step makes, and so on to the parts
    for step, sizes in reversed(steps[1:]):
        shapes.insert(0, step.shapes(shapes[0], 1, *sizes)[0])
    (first, sizes), *others = steps
    parts = tuple(
        Read((name,), shape, read.dtype)
        for name, shape in zip(names, first.shapes(shapes[0], len(names), *sizes), strict=True)
    )
    made = first.make(parts, shapes[0], *sizes)
    for (step, sizes), shape in zip(others, shapes[1:], strict=True):
        made = step.make((made,), shape, *sizes)
    return made


def _same(shape: Shape, count: int, *sizes: int) -> list[Shape]:
    return [shape] * count


def _function(name: str) -> _Step:
    return _Step(_same, lambda parts, shape: Each(name, parts[0]))


def _heads(parts: Sequence[Expr], shape: Shape, width: int) -> Expr:
    """Rows whose halves of each head lie by turns, in the order of a checkpoint."""
    by_turns = Reshape(parts[0], (shape[0] // width, width // 2, 2, *shape[1:]))
    return Reshape(Permute(by_turns, (0, 2, 1, *range(3, len(by_turns.to)))), shape)


def _tiled(
    parts: Sequence[Expr], shape: Shape, dim: int, keys: int, key_width: int, values: int, value_width: int
) -> Expr:
    """Value heads that lie by turns of the key heads, sorted by key head. Queries and keys lie before them."""
    first, share = 2 * keys * key_width, values // keys
    tail = (*shape[:dim], shape[dim] - first, *shape[dim + 1 :])
    apart = Reshape(
        Slice(parts[0], dim, first, shape[dim]), (*shape[:dim], share, keys, value_width, *shape[dim + 1 :])
    )
    dims = list(range(len(apart.to)))
    dims[dim], dims[dim + 1] = dims[dim + 1], dims[dim]
    turned = Reshape(Permute(apart, tuple(dims)), tail)
    return Concat((Slice(parts[0], dim, 0, first), turned), dim) if first else turned


def _of_experts(shape: Shape, count: int, experts: int) -> list[Shape]:
    """Matrices of experts [N, rows, inner], of which ``count`` make up the stack."""
    return [(shape[1] * experts // count, shape[2])] * count


def _transposed_experts(shape: Shape, count: int, experts: int) -> list[Shape]:
    return _of_experts((shape[0], shape[2], shape[1]), count, experts)


def _stacked_transposed(parts: Sequence[Expr], shape: Shape, experts: int) -> Expr:
    return Permute(Reshape(Concat(tuple(parts)), (experts, shape[2], shape[1])), (0, 2, 1))


def _stacked_by_turns(parts: Sequence[Expr], shape: Shape, experts: int) -> Expr:
    """Gates and ups of each expert as columns by turns."""
    halves = Reshape(Concat(tuple(parts)), (experts, 2, shape[2] // 2, shape[1]))
    return Reshape(Permute(halves, (0, 3, 2, 1)), shape)


def _by_turns(parts: Sequence[Expr], shape: Shape) -> Expr:
    """Gates and ups of each expert's bias by turns."""
    return Reshape(Permute(Stack(tuple(parts)), (1, 2, 0)), shape)


def _key_value(parts: Sequence[Expr], shape: Shape, heads: int, keys: int, values: int) -> Expr:
    """What makes keys of a latent is transposed, and apart from what makes values."""
    k_up = Permute(Reshape(parts[0], (heads, shape[1], keys)), (0, 2, 1))
    return Reshape(Concat((k_up, Reshape(parts[1], (heads, values, shape[1]))), 1), shape)


def _key_value_shapes(shape: Shape, count: int, heads: int, keys: int, values: int) -> list[Shape]:
    return [(heads * shape[1], keys), (heads * values, shape[1])]


def _by_key_head(parts: Sequence[Expr], shape: Shape, keys: int, key_width: int, values: int, value_width: int) -> Expr:
    """Queries, keys, values and gates one after the other, sorted by key head."""
    rows, wide = keys * key_width, values * value_width
    apart = [(0, 0, rows), (0, rows, rows), (0, 2 * rows, wide), (1, 0, wide)]
    by_head = (
        Reshape(Slice(parts[i], 0, start, start + count), (keys, count // keys, shape[1])) for i, start, count in apart
    )
    return Reshape(Concat(tuple(by_head), 1), shape)


def _by_key_head_shapes(
    shape: Shape, count: int, keys: int, key_width: int, values: int, value_width: int
) -> list[Shape]:
    gates = values * value_width
    return [(2 * keys * key_width + gates, shape[1]), (gates, shape[1])]


_STEPS: dict[str, _Step] = {
    "-1": _function("-1"),
    "log-": _function("log-"),
    "transposed": _Step(lambda shape, count: [shape[::-1]], lambda parts, shape: Permute(parts[0], (1, 0))),
    "heads": _Step(_same, _heads),
    "tiled": _Step(_same, _tiled),
    "halves": _Step(
        lambda shape, count: [(shape[0] // count, *shape[1:])] * count, lambda parts, shape: Concat(tuple(parts))
    ),
    "stacked": _Step(_of_experts, lambda parts, shape, experts: Reshape(Concat(tuple(parts)), shape)),
    "stacked transposed": _Step(_transposed_experts, _stacked_transposed),
    "stacked by turns": _Step(_transposed_experts, _stacked_by_turns),
    "by turns": _Step(lambda shape, count: [(shape[0], shape[1] // 2)] * count, _by_turns),
    "key and value": _Step(_key_value_shapes, _key_value),
    "by key head": _Step(_by_key_head_shapes, _by_key_head),
}


def without_inverses(expr: Expr) -> Expr:
    """The same without functions of numbers that their inverse made: a model often undoes a step. They would round.
    Reshapes and permutations between them stay."""
    expr = map_parts(expr, without_inverses)
    if not isinstance(expr, Each):
        return expr
    part, between = expr.part, list[Reshape | Permute]()
    while isinstance(part, (Reshape, Permute)):
        between.append(part)
        part = part.part
    if not isinstance(part, Each) or part.function != UNDONE[expr.function]:
        return expr
    made = part.part
    for moved in reversed(between):
        made = replace(moved, part=made)
    return made


def as_stored(expr: Expr, stored: Mapping[str, Any]) -> Expr:
    """The same with reads of tensors that have as many numbers in another shape, such as filters of a convolution."""
    if not isinstance(expr, Read):
        return map_parts(expr, lambda part: as_stored(part, stored))
    there = next((stored[name].shape for name in expr.sources if name in stored), expr.stored)
    if there == expr.stored or min(expr.stored, default=0) < 0 or math.prod(there) != math.prod(expr.stored):
        return expr
    return Reshape(Read(expr.sources, there, expr.dtype), expr.stored)
