"""Bind a linked program to addresses: prepared calls for given sizes, one after another."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from graphllm.program.expr import value
from graphllm.program.linking import LinkedProgram, MemoryPlan, Place
from graphllm.program.states import ITEMSIZE
from graphllm.runtime.kernels import Kernels, Launch
from graphllm.runtime.memory.memory import Array, Memory


class Bound(NamedTuple):
    """A program ready to run at one T and S: call every launch of a part in order, segment by segment.

    parts: by name, the first is "". A segment is launches with a flag: whether they may be captured in a CUDA graph.
    Interpreted pieces may not (their reference bodies read data on the host), nor messages of stages (waiting for a
    message inside a CUDA graph would block the whole graph). A program with such pieces is captured in parts, between
    them.
    results: the kept outputs by name.
    """

    parts: dict[str, list[tuple[bool, list[Launch]]]]
    results: dict[str, Array]


def bind(
    program: LinkedProgram,
    plan: MemoryPlan,
    outside: Mapping[str, Array],
    arena: Array,
    kernels: Kernels,
    symbols: Mapping[str, int],
    memory: Memory,
) -> Bound:
    """Prepare every call for the given T, S and R. outside: weights, states and step tensors by name."""
    binder = _Binder(program.places, plan.offsets, outside, arena, symbols, memory)
    parts: dict[str, list[tuple[bool, list[Launch]]]] = {}
    for kind, body, bundle, part in program.instructions:
        segments = parts.setdefault(part, [])
        captured = kind not in ("ir", "message")
        if not segments or segments[-1][0] != captured:
            segments.append((captured, []))
        launches = segments[-1][1]
        if kind == "kernel":
            name, arguments = body
            launches.append(kernels.bind(bundle["kernels"][name], name, [binder.argument(a) for a in arguments]))
        elif kind in ("extern", "message"):
            from graphllm.ir.externs import routine

            name, arguments = body
            launches.append(functools.partial(routine(name), *map(binder.given, arguments)))
        elif kind == "op":
            target, args, kwargs = body
            launches.append(binder.prepared(target, args, kwargs))
        elif kind == "call":
            outputs, target, args, kwargs = body
            call = binder.prepared(target, args, kwargs)
            launches.append(functools.partial(_call_into, call, [binder.tensor(o) for o in outputs]))
        else:
            from graphllm.runtime.interpreter import interpret

            inputs, outputs = body
            call = functools.partial(interpret, bundle["ir"], [binder.tensor(i) for i in inputs])
            launches.append(functools.partial(_call_into, call, [binder.tensor(o) for o in outputs]))
    return Bound(parts, {r: binder.tensor(program.alias[r]) for r in program.results})


class _Binder:
    def __init__(
        self,
        places: Mapping[str, Place],
        offsets: Mapping[str, int],
        outside: Mapping[str, Array],
        arena: Array,
        symbols: Mapping[str, int],
        memory: Memory,
    ) -> None:
        self._places, self._offsets, self._outside, self._symbols = places, offsets, outside, symbols
        self._arena, self._base, self._memory = arena, arena.data_ptr(), memory
        self._tensors: dict[str, Array] = {}

    def argument(self, item: Any) -> Any:
        """A kernel argument: an address for ["t", name], a number for ["i", expression] or a float, None for null."""
        if isinstance(item, list):
            kind, content = item
            return self._address(content) if kind == "t" else value(content, self._symbols)
        return item

    def given(self, item: Any) -> Any:
        """An argument of an extern routine: as of a kernel, but tensors are tensors."""
        return self.tensor(item[1]) if isinstance(item, list) and item[0] == "t" else self.argument(item)

    def _address(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            return self._outside[name].data_ptr()
        extra = sum(value(o, self._symbols) for o in place.offset)
        if place.storage in self._outside:
            source = self._outside[place.storage]
            return source.data_ptr() + extra * source.element_size()
        return self._base + self._offsets[place.storage] + extra * ITEMSIZE[place.dtype]

    def tensor(self, name: str) -> Array:
        """The tensor of that name; views are made once."""
        made = self._tensors.get(name)
        if made is not None:
            return made
        place = self._places.get(name)
        if place is None:
            return self._outside[name]
        shape = [value(d, self._symbols) for d in place.shape]
        stride = [value(d, self._symbols) for d in place.stride]
        extra = sum(value(o, self._symbols) for o in place.offset)
        if place.storage in self._outside:
            made = self._memory.strided(self._outside[place.storage], shape, stride, extra)
        else:
            typed = self._memory.typed(self._arena, place.dtype)
            first = self._offsets[place.storage] // ITEMSIZE[place.dtype]
            made = self._memory.strided(typed, shape, stride, first + extra)
        self._tensors[name] = made
        return made

    def prepared(self, target: str, args: list[Any], kwargs: Mapping[str, Any]) -> Launch:
        """A call of a torch operator with its arguments filled in."""
        return functools.partial(_operator(target), *self.plain(args), **{k: self.plain(v) for k, v in kwargs.items()})

    def plain(self, item: Any) -> Any:
        """An argument of a torch operator: see `translate.plain` for the encoding."""
        if isinstance(item, dict):
            ((kind, content),) = item.items()
            if kind == "t":
                return self.tensor(content)
            if kind == "f":
                return float(content)
            return value(content, self._symbols) if kind == "i" else _of_torch(content)
        return [self.plain(v) for v in item] if isinstance(item, list) else item


def _operator(name: str) -> Any:
    namespace, rest = name.split("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(_of_torch("ops"), namespace), base), overload or "default")


def _of_torch(name: str) -> Any:
    import torch  # here, because compiled kernels need none of it

    return getattr(torch, name)


def _call_into(call: Any, outputs: list[Array]) -> None:
    result = call()
    for destination, made in zip(outputs, result if isinstance(result, (list, tuple)) else [result], strict=True):
        destination.copy_(made)
