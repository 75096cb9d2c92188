"""A loop as the program that the kernel `graphllm_loop` reads: words, with memory for its registers."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from graphllm.compile.codegen.prebuilt.loop import DTYPES, Access, Loop, Register, Step, registers_read
from graphllm.host.kernel_sources import OPS
from graphllm.program.specs import Dim

KERNEL = "graphllm_loop"
_WHOLE_ROW = 2**62
_BLOCK = 2048  # places of a row that are computed together where no sum goes over the row


@cache
def codes() -> dict[str, int]:
    """The instructions of the kernel: numbers by name, without the k."""
    text = (OPS / "cpu" / "loops" / "codes.h").read_text()
    body = text[text.index("enum Code {") : text.index("};")]
    return {name: i for i, name in enumerate(re.findall(r"^  k(\w+),", body, re.MULTILINE))}


class Encoded(NamedTuple):
    """A loop as the kernel reads it. words: the program. arguments: of the kernel, after the program: root names, then
    sizes."""

    words: list[int]
    roots: list[str]
    sizes: list[str]


def encoded(loop: Loop) -> Encoded:
    """The program of a loop that has been `written`. Registers whose lives do not overlap share memory; a row that is
    stored as it is computed is computed in its place."""
    used = sorted({t for s in loop.steps if (t := _tensor(s)) is not None})
    accesses = [loop.tensors[t] for t in used]
    numbers = {t: i for i, t in enumerate(used)}
    roots = list(dict.fromkeys(a.root for a in accesses))
    inner: Dim = 1 if loop.inner is None else loop.inner
    texts = [d for a in accesses for d in (a.offset, *a.strides, a.inner)]
    sized = [s.operands[0] for s in loop.steps if s.code == "Size"]
    sizes = list(dict.fromkeys(d for d in (*loop.rows, inner, *texts, *sized) if isinstance(d, str)))

    def size(dim: Any) -> int:
        return dim << 1 | 1 if isinstance(dim, int) else (1 + len(roots) + sizes.index(dim)) << 1

    steps = [_numbered(s, numbers, size) for s in loop.steps]
    steps, bound = _in_place(steps, accesses, loop)
    registers = {r.number: r for r in loop.registers}
    constants = {r.number: key for key, r in loop.constants.items()}
    alive = list(dict.fromkeys([*_touched(steps), *[b.dst for b in bound]]))
    taken = [r for r in constants if r in alive]
    order = [*taken, *(r for r in alive if r not in constants)]
    index = {r: i for i, r in enumerate(order)}
    places = _places([registers[r] for r in order], steps, {b.dst for b in bound}, set(taken), accesses)
    words = [len(loop.rows), *map(size, loop.rows), size(inner), _WHOLE_ROW if loop.sums else _BLOCK, len(accesses)]
    for a in accesses:
        words += [1 + roots.index(a.root), DTYPES.index(a.dtype), size(a.offset), *map(size, a.strides), size(a.inner)]
    words += [len(order), places.scalars, places.vectors]
    words += [w for r in order for w in (int(registers[r].whole), *places.of[r])]
    words += [len(taken), *(w for r in taken for w in (index[r], _bits(*constants[r][:2])))]
    final = [*bound, *steps]
    words.append(len(final))
    for s in final:
        dst = s.dst if s.code in ("Store", "Scatter") else index[s.dst]
        plain = (
            len(s.operands) if s.code in ("Load", "Bind", "Row", "Size", "Place") else 1 if s.code == "Gather" else 0
        )
        given = [o if i < plain else index[o] for i, o in enumerate(s.operands)]
        words += [codes()[s.code], dst, *given, *[0] * (3 - len(given))]
    return Encoded(words, roots, sizes)


def _tensor(step: Step) -> int | None:
    if step.code in ("Store", "Scatter"):
        return step.dst
    return step.operands[0] if step.code in ("Load", "Gather") else None


def _numbered(step: Step, numbers: dict[int, int], size: Callable[[Any], int]) -> Step:
    """With numbers of the tensors that are left, and sizes as words."""
    if step.code in ("Store", "Scatter"):
        return step._replace(dst=numbers[step.dst])
    if step.code in ("Load", "Gather"):
        return step._replace(operands=(numbers[step.operands[0]], *step.operands[1:]))
    return step._replace(operands=(size(step.operands[0]),)) if step.code == "Size" else step


def _in_place(steps: list[Step], accesses: list[Access], loop: Loop) -> tuple[list[Step], list[Step]]:
    """Rows of float32 that are stored as they lie need no memory of their own: without their stores, and what binds
    registers to memory."""
    whole = {r.number for r in loop.registers if r.whole and r.floats}
    loaded = {s.dst for s in steps if s.code == "Load"}
    kept, bound, done = [], [], set()
    for s in steps:
        access = accesses[s.dst] if s.code == "Store" else None
        value = s.operands[0] if s.operands else -1
        if (
            access is not None and access.dtype == "float32" and access.inner == 1
            and value in whole and value not in loaded and value not in done
        ):  # fmt: skip
            bound.append(Step("Bind", value, (s.dst,)))
            done.add(value)
        else:
            kept.append(s)
    return kept, bound


def _touched(steps: Sequence[Step]) -> list[int]:
    return [r for s in steps for r in ([] if s.code in ("Store", "Scatter") else [s.dst]) + list(registers_read(s))]


class _Places(NamedTuple):
    """of: by register, its first byte among the scalars, and its bytes by place. scalars: bytes. vectors: bytes a
    place."""

    of: dict[int, tuple[int, int]]
    scalars: int
    vectors: int


def _places(
    registers: Sequence[Register], steps: Sequence[Step], bound: set[int], constants: set[int],
    accesses: Sequence[Access],
) -> _Places:  # fmt: skip
    """Where registers lie. A row of float32 that is read as it lies needs no place."""
    last = {r: i for i, s in enumerate(steps) for r in registers_read(s)}
    direct = {
        s.dst for s in steps
        if s.code == "Load" and accesses[s.operands[0]].dtype == "float32" and accesses[s.operands[0]].inner == 1
    }  # fmt: skip
    scalars = (8 * sum(not r.whole for r in registers) + 63) // 64 * 64
    of: dict[int, tuple[int, int]] = {}
    for i, r in enumerate(r for r in registers if not r.whole):
        of[r.number] = (8 * i, 0)
    whole = {r.number: r for r in registers if r.whole}
    free: dict[int, list[int]] = {4: [], 8: []}
    vectors = 0
    ends: dict[int, list[tuple[int, int]]] = {}
    for i, s in enumerate(steps):
        if s.code not in ("Store", "Scatter") and s.dst in whole and s.dst not in of:
            nbytes = 4 if whole[s.dst].floats else 8
            if s.dst in bound or s.dst in direct:
                of[s.dst] = (scalars, 0)
            else:
                if free[nbytes]:
                    at = free[nbytes].pop()
                else:
                    at, vectors = vectors, vectors + nbytes
                of[s.dst] = (scalars, at)
                ends.setdefault(last.get(s.dst, i), []).append((nbytes, at))
        for nbytes, at in ends.pop(i, ()):
            free[nbytes].append(at)
    return _Places(of, scalars, vectors)


def _bits(floats: bool, value: float | int) -> int:
    """A constant as the word whose bytes it is."""
    return struct.unpack("<q", struct.pack("<fxxxx", value) if floats else struct.pack("<q", int(value)))[0]
