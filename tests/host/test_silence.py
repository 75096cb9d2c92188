"""What counts as silence: a clock and threads that a test moves on by hand, then threads of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from graphllm.host.silence import Silence, Thread, threads_of
from graphllm.runtime.ranks.remote_ranks import Patience

TICK = 0.25


class Watched:
    """A process of some threads, and the watcher's time. Threads do something, all the same, until told otherwise."""

    def __init__(self, threads: int = 1) -> None:
        self.now = 100.0
        self.threads = {n: Thread(0, 0, 1, runnable=False) for n in range(threads)}
        self.silence = Silence(lambda: dict(self.threads), TICK, clock=lambda: self.now)

    def change(self, number: int = 0, ran: float = 0, waited: float = 0, turns: int = 0, runnable: bool = True) -> None:
        """Seconds and turns that a thread has had since."""
        was = self.threads[number]
        self.threads[number] = Thread(
            was.ran + round(1e9 * ran), was.waited + round(1e9 * waited), was.turns + turns, runnable
        )

    def watch(self, seconds: float, every: float = TICK, **change: float) -> float:
        """Look for so long, with a change of thread 0 between two looks; the silence then."""
        for _ in range(round(seconds / every)):
            self.now += every
            if change:
                self.change(**change)  # type: ignore[arg-type]
            self.silence.look()
        return self.silence.seconds


def test_threads_that_sleep_or_are_stopped_could_have_spoken() -> None:
    assert Watched().watch(8) == pytest.approx(8)


def test_a_thread_that_computes_could_have_spoken() -> None:
    """It may have the interpreter's lock and never give it back."""
    assert Watched().watch(8, ran=TICK) == pytest.approx(8)


def test_a_thread_that_gets_no_processor_could_not() -> None:
    """The kernel counts a wait when it ends, so nothing changes until then; and then what it counts is known."""
    watched = Watched(threads=3)
    before = watched.watch(2)
    watched.change(runnable=True)
    watched.watch(TICK)  # from when on it has waited nobody can tell
    assert watched.watch(600) == pytest.approx(before + TICK)
    watched.now += TICK
    watched.change(waited=600, turns=1)
    assert watched.silence.look() == pytest.approx(before + TICK)
    assert watched.watch(4, ran=TICK) == pytest.approx(before + TICK + 4)


@pytest.mark.parametrize("number", [0, 2])
def test_what_any_thread_waits_for_the_processor_does_not_count(number: int) -> None:
    watched = Watched(threads=3)
    before = watched.watch(2)
    assert watched.watch(8, number=number, waited=TICK * 3 / 4, ran=TICK / 4, turns=5) > before
    assert watched.silence.seconds < before + 8 / 2


def test_a_watcher_that_comes_late_accuses_nobody() -> None:
    watched = Watched()
    watched.now += 3600
    assert watched.silence.look() == TICK
    assert watched.watch(40, every=4.0) == pytest.approx(11 * TICK)


def test_a_late_watcher_takes_the_share_of_the_time() -> None:
    """What was waited in a long pause is not taken from the tick of it that counts, but its share."""
    watched = Watched()
    watched.watch(2)
    before = watched.watch(TICK)
    assert watched.watch(4, every=4.0, waited=2.0, turns=9) == pytest.approx(before + TICK / 2)


def test_a_sign_of_life_ends_it() -> None:
    watched = Watched()
    watched.watch(4)
    watched.silence.heard()
    assert watched.silence.seconds == 0
    assert watched.watch(TICK) == TICK


def test_without_words_of_the_kernel_all_time_counts() -> None:
    watched = Watched(threads=0)
    assert watched.watch(8) == pytest.approx(8)


def test_patience_with_a_node_grows_with_its_pauses() -> None:
    patience = Patience()
    usual = patience.seconds
    for _ in range(20):
        assert not patience.heard(0.25)
    assert patience.heard(3.0)
    starved = patience.seconds
    assert starved > 2 * usual
    for _ in range(500):
        patience.heard(0.25)
    assert patience.seconds == usual
    patience.heard(3600)
    assert starved < patience.seconds < 3600


# ---- real threads


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """Two processes that share one processor; this is one of them."""
    command = [sys.executable, "-c", "while True: pass"]
    both = [subprocess.Popen(command) for _ in range(2)]
    for process in both:
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    yield both[0]
    for process in both:
        process.kill()
        process.wait()


def within(seconds: float, *, of: Iterator[bool]) -> bool:
    """Whether a look says yes within that time."""
    deadline = time.monotonic() + seconds
    return any(good or time.monotonic() > deadline for good in of) and time.monotonic() < deadline


def test_the_kernel_says_who_waits(busy: subprocess.Popen[bytes]) -> None:
    def looks(stopped: bool) -> Iterator[bool]:
        first = threads_of(busy.pid)[busy.pid]
        while True:
            thread = threads_of(busy.pid)[busy.pid]
            yield (not thread.runnable) if stopped else (thread.waited > first.waited and thread.ran > first.ran)

    assert within(60, of=looks(stopped=False))
    assert threads_of(busy.pid)[busy.pid].runnable
    os.kill(busy.pid, signal.SIGSTOP)
    assert within(60, of=looks(stopped=True))
    assert threads_of(busy.pid) == threads_of(busy.pid)


def test_threads_of_a_process_and_its_children(busy: subprocess.Popen[bytes]) -> None:
    own = threads_of(os.getpid())
    assert own[threading.get_native_id()].runnable
    assert busy.pid not in own
    assert {*own, busy.pid} <= {*threads_of(os.getpid(), family=True)}


def test_a_process_that_has_ended_has_no_threads(busy: subprocess.Popen[bytes]) -> None:
    busy.kill()
    busy.wait()
    assert threads_of(busy.pid) == {}
