"""Link the pieces of a program into one flat instruction list, and plan the memory of what it makes. No torch.

A piece is like an object file: instructions over local names. `LinkedProgram` resolves the names along the program's
calls; `plan_memory` gives every intermediate a fixed place in one arena, shared where lifetimes do not overlap. The
plan is made at compile time and stored in the artifact; the runtime binds both to addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from graphllm.program.expr import value
from graphllm.program.states import ITEMSIZE

_ALIGN = 256
ZEROED = "zeroed"  # scratch that is zero before and after every kernel; the kernels of a step share it


EXCHANGE = "exchange"  # the table of the group of ranks: `graphllm.ir.exchange`


class PieceCall(NamedTuple):
    """One run of a piece: which bundle, and the program values it reads and makes, in the bundle's order."""

    bundle: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]


class Instruction(NamedTuple):
    kind: str
    body: Any
    bundle: Mapping[str, Any]
    part: str


class Place(NamedTuple):
    """A tensor the program makes: its storage and geometry, as expressions over T, S and R."""

    storage: str
    shape: Sequence[int | str]
    stride: Sequence[int | str]
    offset: tuple[int | str, ...]
    dtype: str


class MemoryPlan(NamedTuple):
    """Where a program's intermediates lie.

    offsets: bytes in the arena by storage.
    arena_bytes: what they need, exactly.
    zeroed: int32 zeros, outside tensor `ZEROED`, that its kernels count in.
    """

    offsets: dict[str, int]
    arena_bytes: int
    zeroed: int


class LinkedProgram:
    """One bucket's program as instructions over named places.

    results: names of program values that must survive the step.
    parts: index of the first call of each part after the first, "".
    """

    def __init__(
        self, calls: Sequence[PieceCall], results: Sequence[str], parts: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.instructions: list[Instruction] = []
        self.places: dict[str, Place] = {}
        self.alias: dict[str, str] = {}
        self.zeroed: list[int | str] = [0]
        self.results = tuple(results)
        begins, part = {number: name for name, number in parts.items()}, ""
        for number, call in enumerate(calls):
            part = begins.get(number, part)
            self._flatten(number, call, part)

    def _flatten(self, number: int, call: PieceCall, part: str) -> None:
        names = dict(zip(call.bundle["inputs"], (self.alias.get(i, i) for i in call.inputs), strict=True))

        def resolve(name: str) -> str:
            return names.get(name, f"{number}.{name}")

        for kind, *body in call.bundle["code"]:
            if kind == "empty":
                name, shape, stride, dtype = body
                self.places[resolve(name)] = Place(resolve(name), shape, stride, (), dtype)
            elif kind == "view":
                name, base, shape, stride, offset = body
                of = self.places.get(resolve(base))
                if of is None:  # a view of a weight or of step data: geometry over an outside tensor
                    self.places[resolve(name)] = Place(resolve(base), shape, stride, (offset,), "")
                else:
                    self.places[resolve(name)] = Place(of.storage, shape, stride, (*of.offset, offset), of.dtype)
            elif kind == "zeroed":
                name, count = body
                self.places[resolve(name)] = Place(ZEROED, [count], [1], (0,), "")
                self.zeroed.append(count)
            elif kind == "exchange":
                (name,) = body
                self.places[resolve(name)] = Place(EXCHANGE, [1], [1], (0,), "")
            elif kind in ("kernel", "op", "call", "ir", "extern", "message"):
                self.instructions.append(Instruction(kind, _renamed(kind, body, resolve), call.bundle, part))
            else:
                raise ValueError(f"this version does not know the piece instruction {kind!r}; recompile the artifact")
        for local, name in zip(call.bundle["outputs"], call.outputs, strict=True):
            self.alias[name] = resolve(local)


def plan_memory(program: LinkedProgram, limits: Mapping[str, int]) -> MemoryPlan:
    """First fit over lifetimes, at the largest sizes; smaller batches use the same places. limits: the largest T, S and
    R of the bucket."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, instruction in enumerate(program.instructions):
        for name in _used(instruction):
            place = program.places.get(name)
            if place is not None:
                first.setdefault(place.storage, i)
                last[place.storage] = i
    for result in program.results:
        place = program.places.get(program.alias[result])
        if place is not None:
            last[place.storage] = len(program.instructions)
    offsets: dict[str, int] = {}
    live: list[tuple[int, int, str]] = []  # (offset, end, storage), sorted by offset
    total = 0
    for storage in sorted((s for s in first if program.places.get(s) is not None), key=lambda s: first[s]):
        live = [x for x in live if last[x[2]] >= first[storage]]
        size, at = _storage_bytes(program.places[storage], limits), 0
        for offset, end, _ in live:
            if offset - at >= size:
                break
            at = max(at, end)
        offsets[storage] = at
        live.append((at, at + size, storage))
        live.sort()
        total = max(total, at + size)
    return MemoryPlan(offsets, total, max(value(count, limits) for count in program.zeroed))


def _storage_bytes(place: Place, limits: Mapping[str, int]) -> int:
    shape = [value(d, limits) for d in place.shape]
    if 0 in shape:
        return 0
    span = 1 + sum((n - 1) * value(s, limits) for n, s in zip(shape, place.stride, strict=True))
    return -(-span * ITEMSIZE[place.dtype] // _ALIGN) * _ALIGN


def _renamed(kind: str, body: Sequence[Any], resolve: Any) -> Any:
    def deep(item: Any) -> Any:
        if isinstance(item, dict):
            return {"t": resolve(item["t"])} if "t" in item else item
        return [deep(v) for v in item] if isinstance(item, list) else item

    if kind in ("kernel", "extern", "message"):
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


def _used(instruction: Instruction) -> list[str]:
    names: list[str] = []

    def deep(item: Any) -> None:
        if isinstance(item, dict):
            names.extend([item["t"]] if "t" in item else [])
        elif isinstance(item, list):
            for v in item:
                deep(v)

    if instruction.kind in ("kernel", "extern"):
        return [a[1] for a in instruction.body[1] if isinstance(a, list) and a[0] == "t"]
    if instruction.kind == "ir":
        return [*instruction.body[0], *instruction.body[1]]
    *outputs, _, args, kwargs = instruction.body
    deep([args, *kwargs.values()])
    return [*names, *(outputs[0] if outputs else ())]
