"""Loops: the element-wise work of a lowered piece, for the prebuilt kernel `graphllm_loop`.

A loop goes over the rows of a space of some dimensions. In each row its instructions run over registers, which hold the
whole inner dimension or one number (`ops/cpu/loops`). Nodes that go over the same rows share a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from graphllm.program.specs import Dim

DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")  # as in dtypes.h
_FLOATS = DTYPES[:3]
_MOST_TENSORS, _MOST_REGISTERS, _MOST_INSTRUCTIONS, _MOST_DIMENSIONS = 64, 200, 120, 6  # the kernel has room for more
_REDUCTIONS = ("Sum", "Mean", "Largest", "Smallest")


class Access(NamedTuple):
    """A tensor as a loop goes over it. root: the value that owns the memory. strides: in elements, by row dimension."""

    root: str
    dtype: str
    offset: Dim
    strides: tuple[Dim, ...]
    inner: Dim


class Register(NamedTuple):
    """number: in its loop. floats: else integers. whole: has a value for each place of the inner dimension."""

    number: int
    floats: bool
    whole: bool


class Step(NamedTuple):
    """An instruction. dst: a register, or of stores a tensor's number. operands: registers or plain numbers."""

    code: str
    dst: int
    operands: tuple[int, ...]


@dataclass
class Loop:
    """A loop that is being written. rows: sizes of its dimensions. inner: size of the inner one, None while all nodes
    have one number a row."""

    rows: tuple[Dim, ...]
    inner: Dim | None = None
    steps: list[Step] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    tensors: list[Access] = field(default_factory=list)
    constants: dict[tuple[bool, float | int], Register] = field(default_factory=dict)
    held: dict[Access, Register] = field(default_factory=dict)
    sizes: dict[Dim, Register] = field(default_factory=dict)
    sums: bool = False

    @property
    def full(self) -> bool:
        """Whether it is too long for another node."""
        return (
            len(self.steps) > _MOST_INSTRUCTIONS
            or len(self.registers) > _MOST_REGISTERS
            or len(self.tensors) > _MOST_TENSORS - 8
        )

    def register(self, floats: bool, whole: bool) -> Register:
        """A new one."""
        made = Register(len(self.registers), floats, whole)
        self.registers.append(made)
        return made

    def emit(self, code: str, floats: bool, *operands: Register) -> Register:
        """The result of an instruction on registers."""
        reduces = code.removeprefix("Int") in _REDUCTIONS
        self.sums |= reduces
        made = self.register(floats, not reduces and any(r.whole for r in operands))
        self.steps.append(Step(code, made.number, tuple(r.number for r in operands)))
        return made

    def constant(self, value: float | int, floats: bool) -> Register:
        """A number."""
        key = (floats, float(value) if floats else int(value))
        key = (*key, str(key[1])) if floats and value != value else key  # type: ignore[assignment]
        if key not in self.constants:
            self.constants[key] = self.register(floats, False)
        return self.constants[key]

    def size(self, dim: Dim) -> Register:
        """A size as a number."""
        if isinstance(dim, int):
            return self.constant(dim, False)
        if dim not in self.sizes:
            made = self.sizes[dim] = self.register(False, False)
            self.steps.append(Step("Size", made.number, (dim,)))  # type: ignore[arg-type]
        return self.sizes[dim]

    def place(self, whole: bool, dimension: int | None) -> Register:
        """Where it is: along a row dimension, or the inner one."""
        made = self.register(False, whole)
        self.steps.append(
            Step("Place", made.number, ()) if dimension is None else Step("Row", made.number, (dimension,))
        )
        return made

    def tensor(self, access: Access) -> int:
        """The number of a tensor."""
        if access not in self.tensors:
            self.tensors.append(access)
        return self.tensors.index(access)

    def load(self, access: Access) -> Register:
        """A tensor's row: as it was computed here, or from memory."""
        if access not in self.held:
            made = self.register(access.dtype in _FLOATS, access.inner != 0)
            self.steps.append(Step("Load", made.number, (self.tensor(access),)))
            self.held[access] = made
        return self.held[access]

    def gather(self, access: Access, offsets: Register) -> Register:
        """Elements or the row of a tensor, ``offsets`` from where ``access`` is."""
        made = self.register(access.dtype in _FLOATS, access.inner != 0 or offsets.whole)
        self.steps.append(Step("Gather", made.number, (self.tensor(access), offsets.number)))
        return made

    def store(self, access: Access, value: Register, offsets: Register | None = None) -> None:
        """Write a row."""
        operands = (value.number,) if offsets is None else (value.number, offsets.number)
        self.steps.append(Step("Store" if offsets is None else "Scatter", self.tensor(access), operands))

    def as_floats(self, r: Register) -> Register:
        """The same numbers."""
        return r if r.floats else self.emit("Float", True, r)

    def as_integers(self, r: Register) -> Register:
        """The same numbers, cut off."""
        return self.emit("Int", False, r) if r.floats else r


def stores(loop: Loop) -> Iterable[Access]:
    """What it writes."""
    return (loop.tensors[s.dst] for s in loop.steps if s.code in ("Store", "Scatter"))


def reads(loop: Loop) -> Iterable[Access]:
    """What it reads from memory."""
    return (loop.tensors[s.operands[0]] for s in loop.steps if s.code in ("Load", "Gather"))


def written(loop: Loop, needed: Callable[[str], bool]) -> Loop:
    """The loop without what nobody needs. needed: whether a value's memory is read by anything else."""
    live: set[int] = set()
    kept: list[Step] = []
    for step in reversed(loop.steps):
        if step.code in ("Store", "Scatter"):
            if not needed(loop.tensors[step.dst].root):
                continue
            live.update(step.operands)
        elif step.dst not in live:
            continue
        else:
            live.update(registers_read(step))
        kept.append(step)
    return Loop(
        loop.rows,
        loop.inner,
        kept[::-1],
        loop.registers,
        loop.tensors,
        loop.constants,
        sums=loop.sums,
        sizes=loop.sizes,
    )


def registers_read(step: Step) -> tuple[int, ...]:
    if step.code == "Gather":
        return step.operands[1:]
    return () if step.code in ("Load", "Place", "Row", "Size") else step.operands


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name of an element type that loops know."""
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else None


def is_float(dtype: str) -> bool:
    """Whether registers hold it as floats."""
    return dtype in _FLOATS
