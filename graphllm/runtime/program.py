"""Link the pieces of a program into one flat instruction list, plan its memory, and bind it to addresses.

A piece is like an object file: instructions over local names. `LinkedProgram` resolves the names along the program's
calls,
gives every intermediate a fixed place in one arena (places are shared when lifetimes do not overlap), and `bind` turns
the list into prepared calls for given T and S. Running a step is then a loop over callables.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphllm.expr import value
from graphllm.runtime.kernels import Kernels, Launch

_ALIGN = 256
# What a step may leave for the engine: see `graphllm.compile.link.Linked`.
RESULTS = ("logits", "adjusted", "tokens", "scores")
ZEROED = "zeroed"  # scratch that is zero before and after every kernel; the kernels of a step share it


class Call(NamedTuple):
    """One run of a piece: which bundle, and the program values it reads and makes, in the bundle's order."""

    bundle: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]


class _Instruction(NamedTuple):
    kind: str
    body: Any
    bundle: Mapping[str, Any]
    part: str


class _Place(NamedTuple):
    """A tensor the program makes: its storage and geometry, as expressions over T and S."""

    storage: str
    shape: Sequence[int | str]
    stride: Sequence[int | str]
    offset: tuple[int | str, ...]
    dtype: str


class Bound(NamedTuple):
    """A program ready to run at one T and S: call every launch of a part in order, segment by segment.

    parts: by name, the first is "". A segment is launches with a flag: whether they may be captured in a CUDA graph.
    Interpreted pieces may not (their reference bodies read data on the host), so a program with some of those is
    captured piecewise, between them. results: the kept outputs by name.
    """

    parts: dict[str, list[tuple[bool, list[Launch]]]]
    results: dict[str, torch.Tensor]


class LinkedProgram:
    """One bucket's program.

    results: names of program values that must survive the step, those it has. limits: the largest T and S of the
    bucket, for which memory is planned. parts: index of the first call of each part after the first, "". arena_bytes:
    what the intermediates need, exactly. zeroed: int32 zeros, outside tensor `ZEROED`, that its kernels count in.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        results: Sequence[str],
        limits: Mapping[str, int],
        parts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._instructions: list[_Instruction] = []
        self._places: dict[str, _Place] = {}
        self._alias: dict[str, str] = {}
        self._zeroed: list[int | str] = [0]
        begins, part = {number: name for name, number in parts.items()}, ""
        for number, call in enumerate(calls):
            part = begins.get(number, part)
            self._flatten(number, call, part)
        self._results = [r for r in results if r in self._alias]
        self._offsets, self.arena_bytes = self._plan(limits)
        self.zeroed = max(value(count, limits) for count in self._zeroed)

    def _flatten(self, number: int, call: Call, part: str) -> None:
        names = dict(zip(call.bundle["inputs"], (self._alias.get(i, i) for i in call.inputs), strict=True))

        def resolve(name: str) -> str:
            return names.get(name, f"{number}.{name}")

        for kind, *body in call.bundle["code"]:
            if kind == "empty":
                name, shape, stride, dtype = body
                self._places[resolve(name)] = _Place(resolve(name), shape, stride, (), dtype)
            elif kind == "view":
                name, base, shape, stride, offset = body
                of = self._places.get(resolve(base))
                if of is None:  # a view of a weight or of step data: geometry over an outside tensor
                    self._places[resolve(name)] = _Place(resolve(base), shape, stride, (offset,), "")
                else:
                    self._places[resolve(name)] = _Place(of.storage, shape, stride, (*of.offset, offset), of.dtype)
            elif kind == "zeroed":
                name, count = body
                self._places[resolve(name)] = _Place(ZEROED, [count], [1], (0,), "")
                self._zeroed.append(count)
            elif kind in ("kernel", "op", "call", "ir"):
                self._instructions.append(_Instruction(kind, _renamed(kind, body, resolve), call.bundle, part))
            else:
                raise ValueError(f"this version does not know the piece instruction {kind!r}; recompile the artifact")
        for local, name in zip(call.bundle["outputs"], call.outputs, strict=True):
            self._alias[name] = resolve(local)

    def _plan(self, limits: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """First fit over lifetimes, at the largest sizes; smaller batches use the same places."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for i, instruction in enumerate(self._instructions):
            for name in _used(instruction):
                place = self._places.get(name)
                if place is not None:
                    first.setdefault(place.storage, i)
                    last[place.storage] = i
        for result in self._results:
            place = self._places.get(self._alias[result])
            if place is not None:
                last[place.storage] = len(self._instructions)
        offsets: dict[str, int] = {}
        live: list[tuple[int, int, str]] = []  # (offset, end, storage), sorted by offset
        total = 0
        for storage in sorted((s for s in first if self._places.get(s) is not None), key=lambda s: first[s]):
            live = [x for x in live if last[x[2]] >= first[storage]]
            size, at = _storage_bytes(self._places[storage], limits), 0
            for offset, end, _ in live:
                if offset - at >= size:
                    break
                at = max(at, end)
            offsets[storage] = at
            live.append((at, at + size, storage))
            live.sort()
            total = max(total, at + size)
        return offsets, total

    def bind(
        self, outside: Mapping[str, torch.Tensor], arena: torch.Tensor, kernels: Kernels, symbols: Mapping[str, int]
    ) -> Bound:
        """Prepare every call for the given T and S. ``outside``: weights, caches and step tensors by name."""
        binder = _Binder(self._places, self._offsets, outside, arena, symbols)
        parts: dict[str, list[tuple[bool, list[Launch]]]] = {}
        for kind, body, bundle, part in self._instructions:
            segments = parts.setdefault(part, [])
            if not segments or segments[-1][0] != (kind != "ir"):
                segments.append((kind != "ir", []))
            launches = segments[-1][1]
            if kind == "kernel":
                name, arguments = body
                launches.append(kernels.bind(bundle["kernels"][name], name, [binder.argument(a) for a in arguments]))
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
        return Bound(parts, {r: binder.tensor(self._alias[r]) for r in self._results})


class _Binder:
    def __init__(
        self,
        places: Mapping[str, _Place],
        offsets: Mapping[str, int],
        outside: Mapping[str, torch.Tensor],
        arena: torch.Tensor,
        symbols: Mapping[str, int],
    ) -> None:
        self._places, self._offsets, self._outside, self._symbols = places, offsets, outside, symbols
        self._arena, self._base = arena, arena.data_ptr()
        self._tensors: dict[str, torch.Tensor] = {}

    def argument(self, item: Any) -> Any:
        """A kernel argument: an address for ["t", name], a number for ["i", expression] or a float, None for null."""
        if isinstance(item, list):
            kind, content = item
            return self._address(content) if kind == "t" else value(content, self._symbols)
        return item

    def _address(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            return self._outside[name].data_ptr()
        extra = sum(value(o, self._symbols) for o in place.offset)
        if place.storage in self._outside:
            source = self._outside[place.storage]
            return source.data_ptr() + extra * source.element_size()
        return self._base + self._offsets[place.storage] + extra * _ITEM[place.dtype]

    def tensor(self, name: str) -> torch.Tensor:
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
            source = self._outside[place.storage]
            made = source.as_strided(shape, stride, source.storage_offset() + extra)
        else:
            item = _ITEM[place.dtype]
            typed = self._arena.view(getattr(torch, place.dtype))
            made = typed.as_strided(shape, stride, self._offsets[place.storage] // item + extra)
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
            return value(content, self._symbols) if kind == "i" else getattr(torch, content)
        return [self.plain(v) for v in item] if isinstance(item, list) else item


_ITEM = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
         "uint8": 1, "bool": 1}  # fmt: skip


def _storage_bytes(place: _Place, limits: Mapping[str, int]) -> int:
    shape = [value(d, limits) for d in place.shape]
    if 0 in shape:
        return 0
    span = 1 + sum((n - 1) * value(s, limits) for n, s in zip(shape, place.stride, strict=True))
    return -(-span * _ITEM[place.dtype] // _ALIGN) * _ALIGN


def _renamed(kind: str, body: Sequence[Any], resolve: Any) -> Any:
    def deep(item: Any) -> Any:
        if isinstance(item, dict):
            return {"t": resolve(item["t"])} if "t" in item else item
        return [deep(v) for v in item] if isinstance(item, list) else item

    if kind == "kernel":
        name, arguments = body
        return name, [["t", resolve(a[1])] if isinstance(a, list) and a[0] == "t" else a for a in arguments]
    if kind == "op":
        target, args, kwargs = body
        return target, deep(args), {k: deep(v) for k, v in kwargs.items()}
    if kind == "call":
        outputs, target, args, kwargs = body
        return [resolve(o) for o in outputs], target, deep(args), {k: deep(v) for k, v in kwargs.items()}
    inputs, outputs = body
    return [resolve(i) for i in inputs], [resolve(o) for o in outputs]


def _used(instruction: _Instruction) -> list[str]:
    names: list[str] = []

    def deep(item: Any) -> None:
        if isinstance(item, dict):
            names.extend([item["t"]] if "t" in item else [])
        elif isinstance(item, list):
            for v in item:
                deep(v)

    if instruction.kind == "kernel":
        return [a[1] for a in instruction.body[1] if isinstance(a, list) and a[0] == "t"]
    if instruction.kind == "ir":
        return [*instruction.body[0], *instruction.body[1]]
    *outputs, _, args, kwargs = instruction.body
    deep([args, *kwargs.values()])
    return [*names, *(outputs[0] if outputs else ())]


def _operator(name: str) -> Any:
    namespace, rest = name.split("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _call_into(call: Any, outputs: list[torch.Tensor]) -> None:
    result = call()
    for destination, made in zip(outputs, [result] if isinstance(result, torch.Tensor) else result, strict=True):
        destination.copy_(made)
