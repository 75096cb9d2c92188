"""The CPU's stream: a thread that works in order, hands back what work gave or raised, and ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from graphllm.runtime.stream import CpuStream
from tests.waiting import PATIENCE


def test_order_values_and_failures() -> None:
    stream, done, may_go = CpuStream(1), [], threading.Event()

    def fail() -> None:
        done.append("failed")
        raise ValueError("work failed")

    first = stream.submit(lambda: (may_go.wait(PATIENCE), done.append("first")))
    second, third = stream.submit(fail), stream.submit(lambda: (done.append("third"), torch.get_num_threads()))
    assert done == []  # submitting waits for nothing
    may_go.set()
    assert third.result()[1] == 1
    assert done == ["first", "failed", "third"]
    for _ in range(2):
        first.result()
        with pytest.raises(ValueError, match="work failed"):
            second.result()
    stream.close()


def test_close_finishes_what_is_queued() -> None:
    before, stream, done = threading.active_count(), CpuStream(1), []
    for i in range(5):
        stream.submit(lambda i=i: (time.sleep(0.01), done.append(i)))
    stream.close()
    assert done == [0, 1, 2, 3, 4]
    assert threading.active_count() == before
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(lambda: None)


def test_a_stream_that_nobody_holds_ends() -> None:
    before, stream = threading.active_count(), CpuStream(1)
    job = stream.submit(lambda: 3)
    del stream
    assert job.result() == 3
    assert threading.active_count() == before


def test_the_interpreter_ends_after_the_work() -> None:
    """Nobody closes the stream: what is queued is done, and the process ends."""
    script = """
import threading
from graphllm.runtime.stream import CpuStream
stream = CpuStream(2)
stream.submit(lambda: (threading.main_thread().join(), print("done", flush=True)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
