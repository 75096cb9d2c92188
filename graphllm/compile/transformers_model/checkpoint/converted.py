"""A weight conversion of transformers as an expression: its operations, read from the last one to the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import core_model_loading as hf

from graphllm.weights.plan.expr import Concat, Expr, Permute, Read, Reshape, Slice, Stack

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shape = tuple[int, ...]
Naming = Callable[[int, int | None], tuple[str, ...]]


class ConversionError(Exception):
    """An operation that no expression says; the text names it."""


class Convert:
    """What a converter makes, as expressions.

    names(source, number): the names of the stored tensor of a source of the converter, by its index; number: which one
        of a list of modules, None for a single tensor.
    of_target(target): the shape of the parameter that a target of the converter names, by its index.
    """

    def __init__(
        self,
        converter: hf.WeightConverter,
        config: PretrainedConfig,
        names: Naming,
        of_target: Callable[[int], Shape],
    ) -> None:
        self._sources = converter.source_patterns
        self._targets = converter.target_patterns
        self._operations = converter.operations
        self._config = config
        self._names, self._of_target = names, of_target

    def expr(self, target: int, shape: Shape) -> Expr:
        """The parameter of a target. shape: that it has. Raises ConversionError."""
        if len(self._sources) > 1 and len(self._targets) > 1:
            raise ConversionError(type(self._operations[0]).__name__)
        return self._after(len(self._operations), target, 0 if len(self._sources) == 1 else None, shape)

    def _after(self, count: int, target: int, source: int | None, shape: Shape) -> Expr:
        """What is there after the first ``count`` operations. target: the index of what becomes of it. source: of
        which stored tensors it is made; None for all of them."""
        if count == 0:
            if source is None:
                raise ConversionError("several tensors that nothing merges")
            return self._read(source, None, shape)
        operation = self._operations[count - 1]

        def before(shape: Shape, of: int | None = source) -> Expr:
            return self._after(count - 1, target, of, shape)

        match operation:
            case hf.MergeModulelist():
                if source is None or count > 1:
                    raise ConversionError(f"{operation!r} after other operations")
                return self._list(source, operation.dim, shape)
            case hf.Concatenate():
                return self._concatenated(operation, source, shape, before)
            case hf.Chunk():
                if operation.num_shards_attribute is not None:
                    raise ConversionError(f"{operation!r} by {operation.num_shards_attribute}")
                return _cut(before, operation.dim, [shape] * len(self._targets), target)
            case hf.Split():
                return _cut(before, operation.dim, [self._of_target(t) for t in range(len(self._targets))], target)
            case hf.Interleave():
                return _interleaved(before(shape), _positive(operation.dim, shape), operation.inverse)
            case hf.Transpose(check_dims=False):
                dims = list(range(len(shape)))
                a, b = _positive(operation.dim0, shape), _positive(operation.dim1, shape)
                dims[a], dims[b] = b, a
                return Permute(before(tuple(shape[d] for d in dims)), tuple(dims))
            case hf.PermuteForRope():
                names = operation.permute_layer_names
                if source is None:
                    raise ConversionError(repr(operation))
                part = before(shape)
                return (
                    part
                    if names and not any(n in self._sources[source] for n in names)
                    else self._rope(operation, part)
                )
            case hf.Conv3dToLinear():
                stored = (shape[0], operation.in_channels, *operation.kernel_size)
                return Reshape(before(stored), shape)
            case hf.LinearToConv3d():
                return Reshape(before((shape[0], math.prod(shape[1:]))), shape)
        raise ConversionError(
            type(operation).__name__ + ("(check_dims=True)" if isinstance(operation, hf.Transpose) else "")
        )

    def _read(self, source: int, number: int | None, shape: Shape) -> Expr:
        return Read(self._names(source, number), shape)

    def _list(self, source: int, dim: int, shape: Shape) -> Expr:
        """One tensor of each module of a list, under a new dimension."""
        dim = _positive(dim, shape)
        each = (*shape[:dim], *shape[dim + 1 :])
        stack: Expr = Stack(tuple(self._read(source, number, each) for number in range(shape[dim])))
        return Permute(stack, (*range(1, dim + 1), 0, *range(dim + 1, len(shape)))) if dim else stack

    def _concatenated(
        self, operation: hf.Concatenate, source: int | None, shape: Shape, before: Callable[..., Expr]
    ) -> Expr:
        """All stored tensors, or all of a list, one after the other. Each has an equal part of the dimension."""
        dim = _positive(operation.dim, shape)
        if operation.num_shards_attribute is not None and source is not None:
            count = getattr(self._config.get_text_config(), operation.num_shards_attribute)
            each = -(-shape[dim] // count)  # the last one may have less, as torch.chunk makes it
            sizes = [min(each, shape[dim] - at) for at in range(0, shape[dim], each)]
            return Concat(tuple(self._read(source, i, _with(shape, dim, n)) for i, n in enumerate(sizes)), dim)
        if source is not None:
            return before(shape)
        if shape[dim] % len(self._sources):
            raise ConversionError(f"{operation!r} of {len(self._sources)} tensors to {shape[dim]} entries")
        part = _with(shape, dim, shape[dim] // len(self._sources))
        parts = tuple(before(part, i) for i in range(len(self._sources)))
        if dim and all(isinstance(p, Stack) for p in parts):  # the parts of each module together
            modules = zip(*(p.parts for p in parts if isinstance(p, Stack)), strict=True)
            return Stack(tuple(Concat(tuple(module), dim - 1) for module in modules))
        return Concat(parts, dim)

    def _rope(self, operation: hf.PermuteForRope, part: Expr) -> Expr:
        """Rows of rotated pairs in the order of halves, head by head, or back."""
        config: Any = self._config
        if operation.subconfig_key is not None:
            config = getattr(config, operation.subconfig_key, config)
        heads, rows = getattr(config, "num_attention_heads", 1), part.shape[0]
        half = rows // heads // 2
        pairs = (2, half) if operation.inverse else (half, 2)
        apart = Reshape(part, (heads, *pairs, *part.shape[1:]))
        return Reshape(Permute(apart, (0, 2, 1, *range(3, len(apart.to)))), part.shape)


def _cut(before: Callable[[Shape], Expr], dim: int, shapes: list[Shape], target: int) -> Expr:
    """One of the parts of a tensor along a dimension."""
    dim = _positive(dim, shapes[0])
    sizes = [shape[dim] for shape in shapes]
    start = sum(sizes[:target])
    return Slice(before(_with(shapes[0], dim, sum(sizes))), dim, start, start + sizes[target])


def _interleaved(part: Expr, dim: int, inverse: bool) -> Expr:
    """Entries 0, 2, 4 .. of a dimension, then 1, 3, 5 ..; inverse: back."""
    shape = part.shape
    pairs = (2, shape[dim] // 2) if inverse else (shape[dim] // 2, 2)
    apart = Reshape(part, (*shape[:dim], *pairs, *shape[dim + 1 :]))
    order = (*range(dim), dim + 1, dim, *range(dim + 2, len(shape) + 1))
    return Reshape(Permute(apart, order), shape)


def _positive(dim: int, shape: Shape) -> int:
    return dim % len(shape)


def _with(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])
