"""Messages through shared memory: in order, whole, to every reader, larger ones than the memory too."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from graphllm.runtime.ranks.all_ranks import AllRanks
from graphllm.runtime.ranks.broadcast import CAPACITY, Reader, Writer
from graphllm.runtime.ranks.rank_failure import RankError, SharedFate
from graphllm.runtime.ranks.rank_messages import Loaded
from graphllm.runtime.ranks.rank_processes import Orders, RankProcesses, WaitingRanks
from tests.waiting import PATIENCE, gone, until


def _never() -> None:
    pass


def test_every_reader_gets_every_message() -> None:
    sizes = [0, 1, 7, 4096, CAPACITY // 3, CAPACITY - 8, 3 * CAPACITY + 5, 2, *range(60)]
    messages = [bytes([i % 251]) * n for i, n in enumerate(sizes)]
    writer = Writer(2)
    readers = [Reader(writer.fd, 2, number, spin) for number, spin in ((0, 0.0), (1, 1e-4))]
    got: list[list[bytearray]] = [[], []]

    def read(number: int) -> None:
        for _ in messages:
            got[number].append(readers[number].read())
            if number and len(got[1]) % 5 == 0:
                time.sleep(0.001)  # the writer waits for the slower one

    threads = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message, _never)
    for thread in threads:
        thread.join(PATIENCE)
    assert got[0] == messages
    assert got[1] == messages
    assert [writer.words(n)[0] for n in range(2)] == [writer.written] * 2


def test_a_writer_that_waits_for_a_reader_looks_whether_it_lives() -> None:
    class GoneError(Exception):
        pass

    def gone() -> None:
        raise GoneError

    writer = Writer(1)
    writer.write(bytes(CAPACITY - 8), gone)
    with pytest.raises(GoneError):
        writer.write(b"one more", gone)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", r"was killed by signal 9 \(SIGKILL\)"),
    ],
)
def test_ranks_that_end_before_they_are_loaded(tmp_path: object, program: str, told: str) -> None:
    ranks = AllRanks(3, SharedFate())
    waiting = WaitingRanks((sys.executable, "-c", program), 2)
    ranks.begin([RankProcesses(waiting, Orders(1, 3, str(tmp_path), "", {}), ranks.fate, ranks.hear)])
    with pytest.raises(RankError, match=rf"rank [12] of 3 \(process \d+\) {told}"):
        ranks.answers(Loaded)
    ranks.close()


def test_ranks_end_when_nobody_holds_their_input() -> None:
    """As when the process of rank 0 is killed: no thread of it can do anything any more."""
    program = (
        "import sys, tempfile; from graphllm.loading.core.rank_main import COMMAND;"
        "from graphllm.runtime.ranks.rank_failure import SharedFate;"
        "from graphllm.runtime.ranks.rank_processes import Orders, RankProcesses, WaitingRanks;"
        "orders = Orders(1, 2, tempfile.mkdtemp(), '', {});"
        "ranks = RankProcesses(WaitingRanks(COMMAND, 1), orders, SharedFate(), print);"
        "print(*ranks.pids, flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    until(lambda: gone(pid))
