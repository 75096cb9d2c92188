"""Weight expressions evaluated with torch: the general path of the loader, and the meaning of every expression."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.host.libraries import Libraries
from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan import expr as ex
from graphllm.weights.plan.simplify import Region, region_of


def evaluate(expr: ex.Expr, fetch: Callable[[Region], Tensor]) -> Tensor:
    """What an expression gives. fetch: a box of a checkpoint tensor, as it is stored. Ranks must be numbers."""
    if (region := region_of(expr)) is not None:
        return fetch(region)
    match expr:
        case ex.Values():
            return torch.tensor(expr.values, dtype=torch.float64).view(expr.shape)
        case ex.Slice():
            return evaluate(expr.part, fetch).narrow(expr.dim, expr.start, expr.stop - expr.start)
        case ex.Concat():
            return torch.cat([evaluate(p, fetch) for p in expr.parts], expr.dim)
        case ex.Stack():
            return torch.stack([evaluate(p, fetch) for p in expr.parts])
        case ex.Reshape():
            return evaluate(expr.part, fetch).reshape(expr.to)
        case ex.Permute():
            return evaluate(expr.part, fetch).permute(expr.dims)
        case ex.Repeat():
            return torch.cat([evaluate(expr.part, fetch)] * expr.times, expr.dim)
        case ex.Pad():
            inner = evaluate(expr.part, fetch)
            out = inner.new_full(expr.shape, expr.value)
            out.narrow(expr.dim, expr.before, inner.shape[expr.dim]).copy_(inner)
            return out
        case ex.Cast():
            return evaluate(expr.part, fetch).to(getattr(torch, expr.dtype))
        case ex.Each():
            return each(expr.function, evaluate(expr.part, fetch))
        case ex.Decode():
            encoding = encoding_of(expr.encoding)
            names = (p.name for p in encoding.parts)
            parts = {n: evaluate(p, fetch) for n, p in zip(names, expr.parts, strict=True)}
            with _named(expr):
                return encoding.decode(parts, *expr.matrix)
        case ex.Rounded():
            return encoding_of(expr.encoding).decode(encoded(expr.encoding, expr.matrix, fetch), *expr.shape)
        case ex.Encode():
            return encoded(expr.encoding, expr.matrix, fetch)[expr.part]
    raise ValueError(f"{expr} cannot be evaluated")


def each(function: str, x: Tensor) -> Tensor:
    """`Each` of numbers, float32. In float64 on the way, so that it does not matter how many are taken at once."""
    return _FUNCTIONS[function](x.double()).float()


_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "-exp": lambda x: -torch.exp(x),
    "+1": lambda x: x + 1,
    "log-": lambda x: torch.log(-x),
    "-1": lambda x: x - 1,
}


@contextmanager
def _named(matrix: ex.Decode) -> Iterator[None]:
    """Errors within name the tensor that the matrix is stored in."""
    try:
        yield
    except ConfigError as problem:
        first = next(e for e in ex.walk(matrix) if isinstance(e, ex.Read))
        raise ConfigError(f"{first.sources[0]}: {problem}") from problem


def encoded(
    name: str, matrix: ex.Expr, fetch: Callable[[Region], Tensor], libraries: Libraries | None = None
) -> Mapping[str, Tensor]:
    """The parts of a matrix in an encoding: repacked where the checkpoint stores it in one that stands for the same
    numbers, else rounded. libraries: see `Encoding`."""
    if isinstance(matrix, ex.Decode) and (repack := encoding_of(matrix.encoding).repacker(name)) is not None:
        names = (p.name for p in encoding_of(matrix.encoding).parts)
        parts = {n: evaluate(p, fetch) for n, p in zip(names, matrix.parts, strict=True)}
        with _named(matrix):
            return repack(parts, *matrix.matrix, libraries)
    return encoding_of(name).encoded(evaluate(matrix, fetch), libraries)
