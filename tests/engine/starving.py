"""Taking the processor from a process: it shares one with many that never sleep and count for more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphllm.host.silence import threads_of

MOST = 40.0  # seconds


@contextlib.contextmanager
def busy_loops(count: int, cpus: set[int] | None = None) -> Iterator[None]:
    """So many, on these processors or on all. A session of its own for each: the kernel may give equal shares to
    sessions."""
    where = ",".join(map(str, cpus or os.sched_getaffinity(0)))
    command = ["taskset", "-c", where, "sh", "-c", "while :; do :; done"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


@contextlib.contextmanager
def starved(pid: int, loops: int = 30) -> Iterator[None]:
    """A process, alone in its session, gets next to no turns meanwhile. Its priority may stay the least afterwards: not
    everybody may raise one."""
    assert os.getsid(pid) == pid
    everywhere, cpu = os.sched_getaffinity(0), {max(os.sched_getaffinity(0))}
    _rank(pid, cpu, os.SCHED_IDLE, 19)
    with busy_loops(loops, cpu):
        yield
    _rank(pid, everywhere, os.SCHED_OTHER, 0)


def _rank(pid: int, cpus: set[int], policy: int, nice: int) -> None:
    with contextlib.suppress(OSError):  # where sessions have shares
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    for tid in threads_of(pid):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(tid, policy, os.sched_param(0))
        os.sched_setaffinity(tid, cpus)


def without_a_turn(pid: int, seconds: float) -> Iterator[None]:
    """Looks at a process until one of its threads has waited for a processor so long, all the time. Skips the test
    where the kernel gives it turns all the same: a machine that others use is not kept busy for long."""
    before = threads_of(pid)
    begun = since = time.monotonic()
    while time.monotonic() - since < seconds:
        if time.monotonic() - begun > MOST:
            pytest.skip("the kernel gives it turns")
        now = threads_of(pid)
        if not any(thread.runnable and before.get(tid) == thread for tid, thread in now.items()):
            since = time.monotonic()
        before = now
        yield
