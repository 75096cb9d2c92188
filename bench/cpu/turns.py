"""A round: the systems of the same bits are loaded side by side and take turns, the machine's own probe among them."""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.cpu.cases import CASES
from bench.cpu.lock import Lock
from bench.cpu.report import MACHINE, Measured, Turn
from bench.process import Process, ProcessFailedError


def take_round(
    bits: int, systems: Mapping[str, Callable[[], Process]], number: int, turns: int, lock: Lock, measured: Measured
) -> None:
    """One round of the systems of ``bits`` bits, added to ``measured``.

    systems: what starts each, by name; MACHINE's is the probe. number: of the round. A system that fails is out, and
    ``measured.missing`` says why. Raises ProcessFailedError when the probe fails.
    """
    draw = random.Random(f"{number} {bits}")
    loaded: dict[str, Process] = {}

    def answer(name: str, call: Callable[..., Any], *command: Mapping[str, str]) -> Any:
        try:
            found = call(loaded[name], *command)
        except ProcessFailedError as failure:
            if name == MACHINE:
                raise
            loaded.pop(name).kill()
            measured.missing[name] = f"failed: {failure}"
            found = None
        asked = [c["case"] for c in command]
        print(f"round {number + 1}, {', '.join([name, *asked])}: {found}", file=sys.stderr, flush=True)
        return found

    def shuffled(names: Iterable[str]) -> list[str]:
        names = list(names)
        return draw.sample(names, len(names))

    def start(name: str, stack: contextlib.ExitStack) -> Any:
        lock.step()
        loaded[name] = stack.enter_context(systems[name]())
        return answer(name, Process.started)

    for name in shuffled(systems):  # one by one: next to others, memory that the host must find first makes it slower
        with contextlib.ExitStack() as single:
            if figures := start(name, single):
                measured.starts.setdefault(name, []).append(figures)
        loaded.pop(name, None)
    with contextlib.ExitStack() as stack:
        for name in shuffled(name for name in systems if name not in measured.missing):
            start(name, stack)
        for index in range(turns):
            turn = Turn(bits, number, index)
            measured.turns.append(turn)
            for case in CASES:
                lock.step()
                command = {"case": case.name, "seed": f"{number} {index}"}
                figures, around = turn.figures.setdefault(case.name, {}), turn.around.setdefault(case.name, {})
                reads = [answer(MACHINE, Process.ask, command)]
                for name in shuffled(name for name in loaded if name != MACHINE):
                    figure = answer(name, Process.ask, command)
                    reads.append(answer(MACHINE, Process.ask, command))
                    if figure is not None:
                        figures[name], around[name] = figure, statistics.harmonic_mean(reads[-2:])
                figures[MACHINE] = statistics.harmonic_mean(reads)
        for name in list(loaded):
            if figures := answer(name, Process.end):
                measured.starts[name][-1].update(figures)
