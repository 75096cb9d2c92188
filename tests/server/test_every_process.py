"""A server of every kind of process there is: two fronts, two engine cores, each of two ranks. Whichever is killed,
in the middle of requests or while it loads, the log says which one it was, no request hangs, the others go on, and no
process stays behind the last."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Served
from tests.waiting import PATIENCE, gone, until

EAGER: dict[str, Any] = {"target": "cpu", "backend": "eager", "dtype": "float32", "max_model_len": 512,
                         "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8}  # fmt: skip
DEGREES = ("--data-parallel-size", 2, "--tensor-parallel-size", 2, "--api-server-count", 2)
LONG = {"prompt": "hello world, the cat", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 12}


def children(pid: int, of: bytes) -> list[int]:
    """Processes that a process has started and whose command line has that text, by age."""
    try:
        started = [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in
                   (task / "children").read_text().split()]  # fmt: skip
        return sorted(one for one in started if of in Path(f"/proc/{one}/cmdline").read_bytes())
    except FileNotFoundError:
        return []


class Processes:
    """Of a server, by kind, each list by age; those of an engine core that is gone are missing."""

    def __init__(self, server: Served) -> None:
        self.controller = server.process.pid
        self.fronts = children(self.controller, b"process.fronts.front")
        self.cores = children(self.controller, b"loading.core.core_main")
        self.ranks = [rank for core in self.cores for rank in children(core, b"loading.core.rank_main")]

    @property
    def all(self) -> list[int]:
        return [*self.fronts, *self.cores, *self.ranks]


def whole(server: Served) -> bool:
    """Whether every process is there, and ready."""
    found = Processes(server)
    counts = [len(found.fronts), len(found.cores), len(found.ranks)]
    return counts == [2, 2, 2] and '"status":"ready"' in server.get("/health")[1].replace(" ", "")


def start(folder: Path, checkpoint: Path) -> Served:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in EAGER.items()]
    longer = ("--hf-overrides", '{"max_position_embeddings": 512}')
    return Served(folder / "log", checkpoint, *DEGREES, "--restart-engine", *longer, *options)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = start(tmp_path_factory.mktemp("every"), checkpoint)
    yield found
    found.process.kill()
    found.process.wait()


@pytest.mark.slow
class TestEveryProcess:
    """One server for all, in this order."""

    @pytest.mark.parametrize(
        ("victim", "told"),
        [
            (lambda found: found.fronts[0], "front-{n} has ended with -9; its streams are lost"),
            (lambda found: found.cores[0], "is dead: killed by signal 9"),
            (lambda found: found.cores[1], "is dead: killed by signal 9"),
            (lambda found: found.ranks[0], "is dead: RankError: rank 1 of 2 (process {pid}) was killed by signal 9"),
            (lambda found: found.ranks[1], "is dead: RankError: rank 1 of 2 (process {pid}) was killed by signal 9"),
        ],
        ids=["front", "core 0", "core 1", "rank of core 0", "rank of core 1"],
    )
    def test_one_that_is_killed(self, server: Served, victim: Callable[[Processes], int], told: str) -> None:
        until(lambda: whole(server))
        expected = self._text(server)
        before = len(server.log.read_text())
        pid = victim(Processes(server))
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(self._ask, server) for _ in range(6)]
            until(lambda: server.metric("graphllm_requests_running") >= 4)
            os.kill(pid, signal.SIGKILL)
            answers = [one.result(PATIENCE) for one in asked]  # none hangs
        assert len(set(answers) - {None}) == 1  # some had nothing to do with it
        wanted = told.format(pid=pid, n="")
        until(lambda: all(part in server.log.read_text()[before:] for part in wanted.split("-", 1)))
        assert gone(pid)
        until(lambda: whole(server))
        assert self._text(server) == expected

    def _text(self, server: Served) -> str:
        """Of a short request, once the front that gets it knows of the engine."""
        answer = until(lambda: (found := server.post("/v1/completions", SHORT))[0] == 200 and found[1])
        return str(answer["choices"][0]["text"])

    def _ask(self, server: Served) -> str | None:
        """The text, or None where the request has lost its front or core."""
        try:
            status, answer, _ = server.post("/v1/completions", LONG)
        except OSError:
            return None
        assert status in (200, 500, 503), answer
        if status != 200:
            assert "killed by signal 9" in answer["error"]["message"]
            return None
        return str(answer["choices"][0]["text"])

    def test_the_controller_is_killed(self, server: Served) -> None:
        """Nobody is left to end the others."""
        found = Processes(server).all
        assert len(found) == 6
        server.process.kill()
        server.process.wait()
        until(lambda: gone(*found))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_loads(checkpoint: Path, tmp_path: Path) -> None:
    """There is no server then, and it says why."""
    server = start(tmp_path, checkpoint)
    try:
        found = until(lambda: len((now := Processes(server)).ranks) == 2 and now)
        os.kill(found.ranks[0], signal.SIGKILL)
        assert server.process.wait(PATIENCE) != 0
        assert f"(process {found.ranks[0]}) was killed by signal 9 (SIGKILL)" in server.log.read_text()
        until(lambda: gone(*found.all))
    finally:
        server.process.kill()
        server.process.wait()
