"""The steps of a piece in order: loops, and instructions between them. A loop is open until an instruction follows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from graphllm.compile.codegen.prebuilt.loop import Access, Loop
from graphllm.program.specs import Dim

Instruction = list[Any]


class Steps:
    """What has been written so far. all: loops and instructions of the piece format."""

    def __init__(self) -> None:
        self.all: list[Loop | Instruction] = []
        self._open = 0  # steps from here on are loops that may still get nodes
        self._writers: dict[str, int] = {}  # the last open loop that writes a root

    def add(self, instruction: Instruction) -> None:
        """An instruction after all steps so far."""
        self.all.append(instruction)
        self._open = len(self.all)
        self._writers.clear()

    def close(self) -> None:
        """What follows may read all memory, at any place."""
        self._open = len(self.all)
        self._writers.clear()

    def loop(self, rows: Sequence[Dim], inner: Dim, reads: Iterable[Access], anywhere: Collection[str] = ()) -> Loop:
        """An open loop over a space in which a node may run, or a new one.

        rows: sizes of the outer dimensions.
        inner: size of the inner one; 1 where the node has one number a row.
        reads: what the node reads, as the loop goes over it.
        anywhere: roots of which it reads more than that.
        """
        wanted = list(reads)
        for number in range(len(self.all) - 1, self._open - 1, -1):
            loop = self.all[number]
            assert isinstance(loop, Loop)
            some = 0 not in (inner, loop.inner)  # over rows of nothing, what has one number a row would not run either
            fits = loop.rows == tuple(rows) and some and (inner == 1 or loop.inner in (None, inner)) and not loop.full
            here = all(self._writers.get(a.root, -1) < number or a in loop.held for a in wanted)
            if fits and here and all(self._writers.get(root, -1) < number for root in anywhere):
                if inner != 1:
                    loop.inner = inner
                return loop
        made = Loop(tuple(rows), None if inner == 1 else inner)
        self.all.append(made)
        return made

    def wrote(self, loop: Loop, root: str) -> None:
        """A loop writes a root: who reads it from memory comes after that loop."""
        number = next(i for i in range(self._open, len(self.all)) if self.all[i] is loop)
        self._writers[root] = max(number, self._writers.get(root, -1))
