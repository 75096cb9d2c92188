"""Weight expressions: how a parameter is made of what a checkpoint stores, as plain data.

An expression is a tree of the frozen dataclasses below. Passes rewrite it (`map_parts`),
`graphllm.weights.plan.simplify` brings slices down to the reads, and the loader evaluates it last. It is written to
JSON as it stands and printed in one line by ``str``. No torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from graphllm.weights.encodings import encoding_of

# -exp: of the logarithms that Mamba stores of its decays. +1: of norms that are stored without their one. log- and -1
# undo these, of files that have what a model computes with.
FUNCTIONS = ("-exp", "+1", "log-", "-1")
UNDONE = {"-exp": "log-", "+1": "-1", "log-": "-exp", "-1": "+1"}
ANY = -1  # an extent of a stored tensor that does not matter, because only a slice of it is taken

_kinds: dict[str, type[Expr]] = {}


class Expr:
    """Base of all expressions: a frozen dataclass of numbers, strings, expressions, and tuples of them."""

    op: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.op = cls.__name__.lower()
        _kinds[cls.op] = cls

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what comes out. Raises ValueError where the expression contradicts itself."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.op}({', '.join(_said(getattr(self, f.name)) for f in _fields(self))})"


@dataclass(frozen=True)
class Read(Expr):
    """One checkpoint tensor. sources: its names, the first one present is taken. stored: the shape that it has, `ANY`
    where an extent does not matter. dtype: that it has; None allows every dtype of plain numbers."""

    sources: tuple[str, ...]
    stored: tuple[int, ...]
    dtype: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored

    def __str__(self) -> str:
        shape = ", ".join("*" if n == ANY else str(n) for n in self.stored)
        return f"read {' or '.join(self.sources)}{f' {self.dtype}' if self.dtype else ''} [{shape}]"


@dataclass(frozen=True)
class Values(Expr):
    """These numbers, in row-major order."""

    values: tuple[float, ...]
    extents: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.values) != math.prod(self.extents):
            raise ValueError(f"{len(self.values)} values for shape {self.extents}")
        return self.extents

    def __str__(self) -> str:
        return f"{len(self.values)} values"


@dataclass(frozen=True)
class Tie(Expr):
    """The whole expression of an entry that is another one: the same memory, nothing is read."""

    to: str

    @property
    def shape(self) -> tuple[int, ...]:
        raise ValueError(f"a tie to {self.to} is no part of an expression")

    def __str__(self) -> str:
        return f"tie {self.to}"


@dataclass(frozen=True)
class Slice(Expr):
    """Entries start to stop (exclusive) of dimension ``dim``; for rank r of a parallel group both move on by
    r // share * per_rank: ``share`` ranks in a row have the same."""

    part: Expr
    dim: int
    start: int
    stop: int
    per_rank: int = 0
    share: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _with_dim(self.part.shape, self.dim)
        extent = shape[self.dim]
        if not 0 <= self.start < self.stop or (extent != ANY and self.stop > extent):
            raise ValueError(f"entries {self.start} to {self.stop} of dimension {self.dim} of {tuple(shape)}")
        shape[self.dim] = self.stop - self.start
        return tuple(shape)

    def __str__(self) -> str:
        rank = "rank" if self.share == 1 else f"(rank // {self.share})"
        by = f" + {self.per_rank} {rank}" if self.per_rank else ""
        return f"slice({self.part}, dim {self.dim}, {self.start}:{self.stop}{by})"


@dataclass(frozen=True)
class Concat(Expr):
    """Parts one after the other along dimension ``dim``."""

    parts: tuple[Expr, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [_with_dim(p.shape, self.dim) for p in self.parts]
        total = sum(s[self.dim] for s in shapes)
        for s in shapes:
            s[self.dim] = total
        if any(s != shapes[0] for s in shapes):
            raise ValueError(f"parts {[p.shape for p in self.parts]} do not fit along dimension {self.dim}")
        return tuple(shapes[0])


@dataclass(frozen=True)
class Stack(Expr):
    """Parts of one shape, under a new dimension 0."""

    parts: tuple[Expr, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = {p.shape for p in self.parts}
        if len(shapes) != 1:
            raise ValueError(f"parts of shapes {sorted(shapes)} cannot be stacked")
        return (len(self.parts), *shapes.pop())


@dataclass(frozen=True)
class Reshape(Expr):
    """The same numbers in row-major order, in another shape."""

    part: Expr
    to: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        if math.prod(self.to) != math.prod(self.part.shape):
            raise ValueError(f"{self.part.shape} reshaped to {self.to}")
        return self.to


@dataclass(frozen=True)
class Permute(Expr):
    """Dimension i of what comes out is dimension dims[i] of the part; (1, 0) transposes a matrix."""

    part: Expr
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.part.shape
        if sorted(self.dims) != list(range(len(shape))):
            raise ValueError(f"dimensions {self.dims} of {shape}")
        return tuple(shape[d] for d in self.dims)


@dataclass(frozen=True)
class Repeat(Expr):
    """The part ``times`` times, one after the other along dimension ``dim``."""

    part: Expr
    dim: int
    times: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _with_dim(self.part.shape, self.dim)
        shape[self.dim] *= self.times
        return tuple(shape)


@dataclass(frozen=True)
class Pad(Expr):
    """The part with entries of ``value`` before and after it along dimension ``dim``."""

    part: Expr
    dim: int
    before: int
    after: int
    value: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _with_dim(self.part.shape, self.dim)
        shape[self.dim] += self.before + self.after
        return tuple(shape)


@dataclass(frozen=True)
class Cast(Expr):
    """Rounded to another dtype on the way. What an entry's expression gives is cast to the entry's dtype anyway."""

    part: Expr
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape


@dataclass(frozen=True)
class Each(Expr):
    """A function of every number, a float32 one of `FUNCTIONS`: what a model would else compute in each step."""

    function: str
    part: Expr

    @property
    def shape(self) -> tuple[int, ...]:
        if self.function not in FUNCTIONS:
            raise ValueError(f"function {self.function!r}: there are {', '.join(FUNCTIONS)}")
        return self.part.shape


@dataclass(frozen=True)
class Decode(Expr):
    """The matrix [rows, inner] that the parts of an encoding stand for. parts: in the encoding's order."""

    encoding: str
    parts: tuple[Expr, ...]
    matrix: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        for part, expr in zip(encoding_of(self.encoding).parts, self.parts, strict=True):
            if expr.shape != part.shape(*self.matrix):
                raise ValueError(
                    f"{part.name} of {self.encoding} for {self.matrix} is {part.shape(*self.matrix)}, not {expr.shape}"
                )
        return self.matrix

    def __str__(self) -> str:
        return f"decode({self.encoding}, {_said(self.parts)})"


@dataclass(frozen=True)
class Encode(Expr):
    """One part of the encoding of a matrix [rows, inner]. All parts of equal matrices are made at once."""

    encoding: str
    part: str
    matrix: Expr

    @property
    def shape(self) -> tuple[int, ...]:
        rows, inner = self.matrix.shape
        return encoding_of(self.encoding).part(self.part).shape(rows, inner)

    def __str__(self) -> str:
        return f"encode({self.encoding}.{self.part}, {self.matrix})"


@dataclass(frozen=True)
class Rounded(Expr):
    """The numbers that an encoding would keep of a matrix [rows, inner], for devices that do not read the encoding."""

    encoding: str
    matrix: Expr

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def __str__(self) -> str:
        return f"rounded({self.encoding}, {self.matrix})"


def parts_of(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly under this one."""
    found: list[Expr] = []
    for f in _fields(expr):
        value = getattr(expr, f.name)
        found += value if isinstance(value, tuple) and value and isinstance(value[0], Expr) else ()
        found += (value,) if isinstance(value, Expr) else ()
    return tuple(found)


def renamed(expr: Expr, name: Callable[[str], str]) -> Expr:
    """The expression with other names of the checkpoint tensors that it reads."""
    if isinstance(expr, Read):
        return dataclasses.replace(expr, sources=tuple(map(name, expr.sources)))
    return map_parts(expr, lambda part: renamed(part, name))


def map_parts(expr: Expr, fn: Callable[[Expr], Expr]) -> Expr:
    """The expression with ``fn`` of everything that is directly under it."""
    changed: dict[str, Any] = {}
    for f in _fields(expr):
        value = getattr(expr, f.name)
        if isinstance(value, Expr):
            changed[f.name] = fn(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Expr):
            changed[f.name] = tuple(fn(p) for p in value)
    return dataclasses.replace(expr, **changed) if changed else expr  # type: ignore[type-var]


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything under it."""
    yield expr
    for part in parts_of(expr):
        yield from walk(part)


def to_plain(expr: Expr) -> dict[str, Any]:
    """For JSON: the fields under ``op``, the name of the kind."""
    return {"op": expr.op, **{f.name: _plain(getattr(expr, f.name)) for f in _fields(expr)}}


def from_plain(plain: Any) -> Any:
    """What `to_plain` wrote. Raises KeyError with the kind for one that is not known, TypeError for wrong fields."""
    if isinstance(plain, list):
        return tuple(from_plain(p) for p in plain)
    if isinstance(plain, dict):
        return _kinds[plain["op"]](**{name: from_plain(value) for name, value in plain.items() if name != "op"})
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Expr):
        return to_plain(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _said(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Expr):
        return ", ".join(map(str, value))
    return str(value)


def _fields(expr: Expr) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(expr)  # type: ignore[arg-type]


def _with_dim(shape: tuple[int, ...], dim: int) -> list[int]:
    if not 0 <= dim < len(shape):
        raise ValueError(f"dimension {dim} of {shape}")
    return list(shape)
