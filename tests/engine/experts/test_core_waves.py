"""Cores that step together: whoever gets work when, all make the same steps, and all sleep when none has any."""

from __future__ import annotations

import contextlib
import os
import random
import select
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from graphllm.engine.experts.lockstep import CoreWaves, PeerError
from tests.waiting import PATIENCE, until


class Table:
    """Where threads put their numbers and take the largest ones."""

    def __init__(self, count: int) -> None:
        self._said: list[list[int]] = [[]] * count
        self._meeting = threading.Barrier(count, timeout=PATIENCE)

    def most(self, rank: int, numbers: list[int]) -> list[int]:
        self._said[rank] = list(map(int, numbers))
        self._meeting.wait()
        found = [max(column) for column in zip(*self._said, strict=True)]
        self._meeting.wait()
        return found


class Core:
    """A loop as the engine core's, whose requests are numbers of steps. asleep: it waits for a request or a bell."""

    def __init__(self, rank: int, table: Table, count: int, place: str) -> None:
        self.waves = CoreWaves(rank, count, lambda said: table.most(rank, said), place, contextlib.ExitStack())
        self.wakes, self.pipe = os.pipe()  # requests, and the end
        self.done, self.asleep = 0, False
        self.told: list[tuple[int, bool]] = []

    def run(self) -> None:
        left: list[int] = []
        while True:
            while not self.waves.running:
                self.asleep = True
                readable, _, _ = select.select([self.wakes, self.waves.bell], [], [], PATIENCE)
                assert readable, "nobody rang"
                self.asleep = False
                if self.wakes in readable and self._take(left):
                    return
                self.waves.hear()
            if select.select([self.wakes], [], [], 0)[0]:
                assert not self._take(left)
            agreed = self.waves.agree(len(left), len(left) > 2, bool(left))
            self.told.append((agreed.tokens, agreed.mixed))
            self.done += left.count(1)
            left[:] = [n - 1 for n in left if n > 1]

    def _take(self, left: list[int]) -> bool:
        lengths = os.read(self.wakes, 1)
        if lengths == b"\0":
            return True
        left.extend(lengths)
        self.waves.begin()
        return False


@pytest.mark.parametrize(("count", "seed"), [(2, 1), (2, 2), (3, 3), (8, 4)])
def test_work_that_comes_at_any_time(count: int, seed: int) -> None:
    draw, table, place = random.Random(seed), Table(count), uuid.uuid4().hex
    with ThreadPoolExecutor(count) as pool:
        made = [pool.submit(Core, rank, table, count, place) for rank in range(count)]
        cores = [future.result() for future in made]
        running = [pool.submit(core.run) for core in cores]
        given = [0] * count
        for _ in range(150):
            rank = draw.randrange(count)
            os.write(cores[rank].pipe, bytes([draw.randint(1, 6)]))
            given[rank] += 1
            if draw.random() < 0.3:
                time.sleep(draw.choice([0, 1e-4, 2e-3, 3e-2]))
        until(lambda: [core.done for core in cores] == given and all(core.asleep for core in cores))
        steps = len(cores[0].told)
        for core in cores:
            os.write(core.pipe, b"\0")
        for future in running:
            future.result()
    assert [len(core.told) for core in cores] == [steps] * count
    assert all(core.told == cores[0].told for core in cores)
    assert {core.waves._wave for core in cores} == {cores[0].waves._wave}
    assert cores[0].waves._wave > 1
    assert any(tokens for tokens, _ in cores[0].told)
    for core in cores:
        core.waves.close()
        os.close(core.wakes)
        os.close(core.pipe)


def test_a_core_that_is_gone_is_named() -> None:
    """Its process is, whatever the library says of the connection."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    answers: list[Any] = [[os.getpid(), other.pid]]

    def most(said: list[int]) -> list[int]:
        if answers:
            return list(answers.pop())
        raise RuntimeError("connection closed by peer")

    waves = CoreWaves(0, 2, most, uuid.uuid4().hex, contextlib.ExitStack())
    waves.check()
    other.kill()
    other.wait()
    told = rf"engine core 1 of 2 \(process {other.pid}\) is gone, and with it the experts that only it has"
    for act in (waves.check, waves.begin, lambda: waves.agree(1, False, True)):
        waves.running = False
        with pytest.raises(PeerError, match=told):
            act()
    with pytest.raises(ValueError, match="mine"), waves.watched():
        raise ValueError("mine")
    waves.close()


def test_what_waits_in_a_core_that_sleeps_is_no_work() -> None:
    said: list[list[int]] = []

    def most(numbers: list[int]) -> list[int]:
        said.append(list(map(int, numbers)))
        return said[-1]

    waves = CoreWaves(0, 1, most, uuid.uuid4().hex, contextlib.ExitStack())
    try:
        waves.begin()
        waves.quiet = True
        waves.agree(0, False, busy=True)
        assert said[-1] == [0, 0, 0]
        assert not waves.running
        waves.begin()
        assert not waves.running
        waves.quiet = False
        waves.begin()
        assert waves.running
        waves.agree(3, False, busy=True)
        assert said[-1] == [3, 0, 1]
    finally:
        waves.close()
