"""Rewrites of weight expressions that leave their numbers as they are: slices move down to the reads, ranks become
numbers, what a checkpoint stores encoded is taken as it is stored. No torch."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan import expr as ex


def simplify(expr: ex.Expr) -> ex.Expr:
    """The expression with slices as far down as they go, and without what does nothing. Its numbers, evaluated, are
    bitwise the same."""
    expr = ex.map_parts(expr, simplify)
    if isinstance(expr, ex.Slice):
        return _slice(expr)
    if isinstance(expr, ex.Encode):
        return _encode(expr)
    if isinstance(expr, ex.Concat) and len(expr.parts) == 1:
        return expr.parts[0]
    if isinstance(expr, ex.Permute):
        inner = expr.part
        if isinstance(inner, ex.Permute):
            expr = ex.Permute(inner.part, tuple(inner.dims[d] for d in expr.dims))
        return expr.part if expr.dims == tuple(range(len(expr.dims))) else expr
    if isinstance(expr, ex.Reshape):
        part = expr.part.part if isinstance(expr.part, ex.Reshape) else expr.part
        if (one := _one_of_stack(part, expr.to)) is not None:
            return one
        if isinstance(part, ex.Stack) and len(part.parts) == 1:  # a dimension of 1 more than its part
            return simplify(ex.Reshape(part.parts[0], expr.to))
        if isinstance(part, ex.Concat) and part.dim and part.shape == (1, *expr.to):
            return simplify(ex.Concat(tuple(simplify(ex.Reshape(p, p.shape[1:])) for p in part.parts), part.dim - 1))
        return part if part.shape == expr.to else ex.Reshape(part, expr.to)
    return expr


def _one_of_stack(part: ex.Expr, to: tuple[int, ...]) -> ex.Expr | None:
    """One matrix of a stack of encoded ones, which one depends on the rank: the parts of one, decoded. None for
    others."""
    if not isinstance(part, ex.Slice) or part.dim or not isinstance(part.part, ex.Stack) or part.shape != (1, *to):
        return None

    def one(parts: tuple[ex.Expr, ...]) -> ex.Expr:
        first = parts[0]
        if isinstance(first, ex.Decode) and {(p.encoding, p.matrix) for p in parts if isinstance(p, ex.Decode)} == {
            (first.encoding, first.matrix)
        }:
            return ex.Decode(first.encoding, _each(parts), first.matrix)
        if isinstance(first, ex.Concat):
            return ex.Concat(_each(parts), first.dim)
        return ex.Reshape(dataclasses.replace(part, part=ex.Stack(parts)), first.shape)

    def _each(parts: tuple[ex.Expr, ...]) -> tuple[ex.Expr, ...]:
        return tuple(map(one, zip(*(ex.parts_of(p) for p in parts), strict=True)))

    parts, leaves = part.part.parts, {type(e) for e in ex.walk(part.part)}
    alike = len({tuple((type(e), e.shape) for e in ex.walk(p)) for p in parts}) == 1
    return one(parts) if ex.Decode in leaves and leaves <= {ex.Stack, ex.Concat, ex.Decode, ex.Read} and alike else None


def at_rank(expr: ex.Expr, rank: int) -> ex.Expr:
    """The expression as one rank of a parallel group evaluates it."""
    expr = ex.map_parts(expr, lambda part: at_rank(part, rank))
    if isinstance(expr, ex.Slice) and expr.per_rank:
        by = rank // expr.share * expr.per_rank
        return ex.Slice(expr.part, expr.dim, expr.start + by, expr.stop + by)
    return expr


def is_same(expr: ex.Expr, name: str) -> bool:
    """Whether a matrix is stored in an encoding, or in one that is repacked to it."""
    if not isinstance(expr, ex.Decode):
        return False
    return expr.encoding == name or encoding_of(expr.encoding).repacker(name) is not None


def same_encodings(expr: ex.Expr) -> tuple[str, ...]:
    """The encodings in which a matrix that the checkpoint stores encoded can be taken without rounding: as it is stored
    first, then those that it is repacked to. Empty for other numbers, and where the tensors that make up the matrix
    cannot be merged."""
    expr = simplify(expr)
    first = expr.parts[0] if isinstance(expr, ex.Concat) and expr.dim == 0 else expr
    if not isinstance(first, ex.Decode):
        return ()
    names = (first.encoding, *(name for name, _ in encoding_of(first.encoding).repacked))
    return tuple(name for name in names if _is_taken(expr, name))


def _is_taken(expr: ex.Expr, name: str) -> bool:
    """Whether nothing of a matrix has to be decoded for an encoding."""
    made = (simplify(ex.Encode(name, part.name, expr)) for part in encoding_of(name).parts)
    left = (e for part in made for e in ex.walk(part) if isinstance(e, ex.Encode))
    return all(is_same(e.matrix, name) for e in left)


def rows_moved(expr: ex.Expr) -> ex.Expr:
    """A matrix, or a stack of some, that the checkpoint stores as one encoded matrix, its rows in another order or
    transposed, or some of them: the same rows of the parts, decoded. Other expressions stay as they are, and those that
    move rows out of their block of the encoding."""
    found = None if isinstance(expr, ex.Decode) else _moved(expr)
    if found is None or found[1] != len(expr.shape) - 1 or not isinstance(decode := found[0], ex.Decode):
        return expr
    rows, inner = math.prod(expr.shape[:-1]), expr.shape[-1]
    encoding = encoding_of(decode.encoding)
    parts: list[ex.Expr] = []
    for part, stored in zip(encoding.parts, decode.parts, strict=True):
        try:
            where = encoding.along(part, 0, decode.matrix)
        except ValueError:
            return expr
        if where is None:
            parts.append(stored)
            continue
        moved = _lines_moved(expr, decode, stored, *where) if len(stored.shape) == 2 else None
        if moved is None:
            return expr
        parts.append(moved)
    return ex.Reshape(ex.Decode(decode.encoding, tuple(parts), (rows, inner)), expr.shape)


def in_stored_rows(expr: ex.Expr) -> ex.Expr:
    """A matrix, or several one after the other, with `rows_moved` of each."""
    if isinstance(expr, ex.Concat) and expr.dim == 0:
        return simplify(ex.Concat(tuple(simplify(rows_moved(part)) for part in expr.parts)))
    return simplify(rows_moved(expr))


def _lines_moved(expr: ex.Expr, decode: ex.Decode, stored: ex.Expr, dim: int, each: int) -> ex.Expr | None:
    """A part, with the lines of its dimension where the rows of the decoded matrix go; as many lines stand for a block
    of rows. None where a block is cut."""
    block = encoding_of(decode.encoding).block[0]
    lines = ex.Permute(stored, (1, 0)) if dim else stored
    count, width = lines.shape
    if decode.matrix[0] % block or count * block != decode.matrix[0] * each:
        return None
    moved = _in_place_of(expr, decode, ex.Reshape(lines, (count // each, each * width)) if each > 1 else lines, block)
    if moved is None:
        return None
    moved = ex.Reshape(moved, (math.prod(moved.shape[:-1]) * each, width))
    return simplify(ex.Permute(moved, (1, 0)) if dim else moved)


def _moved(expr: ex.Expr) -> tuple[ex.Expr, int] | None:
    """The decoded matrix under reshapes, permutations and slices that keep its inner dimension whole, and where that
    is."""
    if isinstance(expr, ex.Decode):
        return expr, 1
    under = _moved(expr.part) if isinstance(expr, (ex.Reshape, ex.Permute, ex.Slice)) else None
    if under is None:
        return None
    decode, at = under
    if isinstance(expr, ex.Slice):
        return None if expr.dim == at else under
    if isinstance(expr, ex.Permute):
        return decode, expr.dims.index(at)
    assert isinstance(expr, ex.Reshape)
    place = _kept(expr, at)
    return None if place is None else (decode, place)


def _kept(expr: ex.Reshape, at: int) -> int | None:
    """Where a dimension of the part is after a reshape; None where it is divided or merged."""
    before, extent = math.prod(expr.part.shape[:at]), expr.part.shape[at]
    places = [d for d in range(len(expr.to)) if math.prod(expr.to[:d]) == before and expr.to[d] == extent]
    return places[0] if places else None


def _in_place_of(expr: ex.Expr, decode: ex.Expr, stored: ex.Expr, block: int) -> ex.Expr | None:
    """The reshapes, permutations and slices of `_moved`, of a part in place of the decoded matrix. block: rows of the
    matrix that a line of the part stands for; None where one is cut."""
    if expr is decode:
        return stored
    assert isinstance(expr, (ex.Reshape, ex.Permute, ex.Slice))
    inner, under = _in_place_of(expr.part, decode, stored, block), _moved(expr.part)
    if inner is None:
        return None
    assert under is not None
    if isinstance(expr, ex.Permute):
        return ex.Permute(inner, expr.dims) if block == 1 else None
    if isinstance(expr, ex.Slice):
        by = block if expr.dim == under[1] - 1 else 1  # neighbouring rows are counted there
        numbers = expr.start, expr.stop, expr.per_rank
        if any(n % by for n in numbers):
            return None
        start, stop, per_rank = (n // by for n in numbers)
        return dataclasses.replace(expr, part=inner, start=start, stop=stop, per_rank=per_rank)
    place = _kept(expr, under[1])
    assert place is not None
    to = [inner.shape[under[1]] if d == place else n for d, n in enumerate(expr.to)]
    if to[place - 1] % block:
        return None
    to[place - 1] //= block
    return ex.Reshape(inner, tuple(to))


class Region(NamedTuple):
    """A box of a checkpoint tensor: entries starts to stops of each dimension."""

    read: ex.Read
    starts: tuple[int, ...]
    stops: tuple[int | None, ...]  # None: to the end, where the extent does not matter

    def within(self, extents: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Of a tensor of these extents: the box's shape, and how many numbers lie before its first one."""
        stops = (n if stop is None else stop for n, stop in zip(extents, self.stops, strict=True))
        shape = tuple(stop - start for start, stop in zip(self.starts, stops, strict=True))
        return shape, sum(start * math.prod(extents[d + 1 :]) for d, start in enumerate(self.starts))


def region_of(expr: ex.Expr) -> Region | None:
    """The box that a read, or slices of one, take; None for other expressions. Ranks must be numbers."""
    if isinstance(expr, ex.Read):
        return Region(expr, (0,) * len(expr.stored), tuple(n if n >= 0 else None for n in expr.stored))
    if not isinstance(expr, ex.Slice) or (under := region_of(expr.part)) is None:
        return None
    starts, stops = list(under.starts), list(under.stops)
    starts[expr.dim], stops[expr.dim] = starts[expr.dim] + expr.start, starts[expr.dim] + expr.stop
    return Region(under.read, tuple(starts), tuple(stops))


def _slice(expr: ex.Slice) -> ex.Expr:
    """A slice of something simplified."""
    part, dim, start, stop = expr.part, expr.dim, expr.start, expr.stop
    if not expr.per_rank and (start, stop) == (0, part.shape[dim]):
        return part

    def of(inner: ex.Expr, to: int) -> ex.Expr:
        return simplify(dataclasses.replace(expr, part=inner, dim=to))

    if isinstance(part, ex.Slice) and part.dim == dim:
        moving = [s for s in (part, expr) if s.per_rank]
        if len({s.share for s in moving}) > 1:
            return expr
        by, share = part.per_rank + expr.per_rank, moving[0].share if moving else 1
        return simplify(ex.Slice(part.part, dim, part.start + start, part.start + stop, by, share))
    if isinstance(part, ex.Slice) and part.dim > dim:  # slices stand in one order, so that two of a dimension meet
        return simplify(dataclasses.replace(part, part=of(part.part, dim)))
    if isinstance(part, ex.Permute):
        return simplify(ex.Permute(of(part.part, part.dims[dim]), part.dims))
    if isinstance(part, ex.Cast):
        return ex.Cast(of(part.part, dim), part.dtype)
    if isinstance(part, ex.Each):
        return ex.Each(part.function, of(part.part, dim))
    if isinstance(part, (ex.Repeat, ex.Pad)) and part.dim != dim:
        return dataclasses.replace(part, part=of(part.part, dim))
    if isinstance(part, ex.Concat) and part.dim != dim:
        return ex.Concat(tuple(of(p, dim) for p in part.parts), part.dim)
    if isinstance(part, ex.Stack) and dim > 0:
        return ex.Stack(tuple(of(p, dim - 1) for p in part.parts))
    if isinstance(part, ex.Decode):
        return _slice_of_decode(expr, part)
    if isinstance(part, ex.Rounded) and dim == 0 and encoding_of(part.encoding).block[0] == 1:
        return ex.Rounded(part.encoding, of(part.matrix, dim))  # its scales may be of whole rows
    if isinstance(part, ex.Reshape):
        return _slice_of_reshape(expr, part)
    if expr.per_rank:
        return expr
    if isinstance(part, ex.Stack):
        return ex.Stack(part.parts[start:stop])
    if isinstance(part, ex.Repeat):
        return simplify(ex.Slice(ex.Concat((part.part,) * part.times, dim), dim, start, stop))
    if isinstance(part, ex.Concat):
        return _slice_of_concat(expr, part)
    if isinstance(part, ex.Values) and len(part.extents) == 1:
        return ex.Values(part.values[start:stop], (stop - start,))
    if isinstance(part, ex.Pad):
        return _slice_of_pad(expr, part)
    return expr


def _slice_of_concat(expr: ex.Slice, part: ex.Concat) -> ex.Expr:
    """Of each part what lies in the slice."""
    found: list[ex.Expr] = []
    at = 0
    for p in part.parts:
        extent = p.shape[part.dim]
        a, b = max(expr.start - at, 0), min(expr.stop - at, extent)
        if a < b:
            found.append(simplify(ex.Slice(p, part.dim, a, b)))
        at += extent
    return found[0] if len(found) == 1 else ex.Concat(tuple(found), part.dim)


def _slice_of_pad(expr: ex.Slice, part: ex.Pad) -> ex.Expr:
    """A slice of the part with what is left of its padding."""
    extent = part.part.shape[part.dim]
    a, b = max(expr.start - part.before, 0), min(expr.stop - part.before, extent)
    if a >= b:
        filled: ex.Expr = ex.Values((part.value,), (1,) * len(expr.shape))
        for dim, times in enumerate(expr.shape):
            filled = ex.Repeat(filled, dim, times)
        return filled
    inner = simplify(ex.Slice(part.part, part.dim, a, b))
    before, after = max(part.before - expr.start, 0), max(expr.stop - part.before - extent, 0)
    return ex.Pad(inner, part.dim, before, after, part.value) if before or after else inner


def _slice_of_reshape(expr: ex.Slice, part: ex.Reshape) -> ex.Expr:
    """A slice of what is reshaped, where a dimension of it begins at the same place and its entries make up the
    slice's."""
    inside, dim = part.part.shape, expr.dim
    before, width = math.prod(part.to[:dim]), math.prod(part.to[dim + 1 :])
    to = (*part.to[:dim], expr.stop - expr.start, *part.to[dim + 1 :])
    for place in range(len(inside)):
        rows = math.prod(inside[place + 1 :])
        at = [n * width for n in (expr.start, expr.stop, expr.per_rank)]
        if math.prod(inside[:place]) != before or inside[place] == 1 or not rows or any(n % rows for n in at):
            continue
        start, stop, by = (n // rows for n in at)
        return simplify(ex.Reshape(simplify(ex.Slice(part.part, place, start, stop, by, expr.share)), to))
    return expr


def _slice_of_decode(expr: ex.Slice, part: ex.Decode) -> ex.Expr:
    """The decoded slices of the parts, where it begins and ends at blocks."""
    encoding, dim = encoding_of(part.encoding), expr.dim
    block, extent = encoding.block[dim], part.matrix[dim]
    if expr.start % block or expr.per_rank % block or (expr.stop % block and (expr.per_rank or expr.stop != extent)):
        return expr
    cut: list[ex.Expr] = []
    for p, stored in zip(encoding.parts, part.parts, strict=True):
        try:
            where = encoding.along(p, dim, part.matrix)
        except ValueError:
            return expr
        if where is None:
            cut.append(stored)
            continue
        to, each = where
        start, stop = (-(-n // block) * each for n in (expr.start, expr.stop))
        cut.append(simplify(ex.Slice(stored, to, start, stop, expr.per_rank // block * each, expr.share)))
    matrix = list(part.matrix)
    matrix[dim] = expr.stop - expr.start
    return ex.Decode(part.encoding, tuple(cut), (matrix[0], matrix[1]))


def _encode(expr: ex.Encode) -> ex.Expr:
    """What was decoded from the same encoding is taken as it is stored."""
    encoding, matrix = encoding_of(expr.encoding), expr.matrix
    names = [p.name for p in encoding.parts]
    if isinstance(matrix, ex.Decode) and matrix.encoding == expr.encoding:
        return matrix.parts[names.index(expr.part)]
    if not isinstance(matrix, ex.Concat) or matrix.dim != 0:
        return expr
    pieces = [p for p in matrix.parts if isinstance(p, ex.Decode) and is_same(p, expr.encoding)]
    if len(pieces) < len(matrix.parts) or any(p.matrix[0] % encoding.block[0] for p in pieces[:-1]):
        return expr
    try:
        where = encoding.along(encoding.part(expr.part), 0, pieces[0].matrix)
    except ValueError:
        return expr
    if where is None:
        return expr
    return ex.Concat(tuple(_encode(ex.Encode(expr.encoding, expr.part, p)) for p in pieces), where[0])
