"""A server whose engine has two ranks: text as of one, and whichever process is killed, an error that names it, no
process that stays, and a new engine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM, SamplingParams
from tests.artifacts import LIMITS
from tests.server.live import Served
from tests.waiting import PATIENCE, gone, until

EAGER: dict[str, Any] = {"target": "cpu", "backend": "eager", "dtype": "float32", **LIMITS}
PROMPT = "hello world, the cat"


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in EAGER.items()]
    found = Served(tmp_path / "log", checkpoint, "--tensor-parallel-size", 2, "--restart-engine", *options)
    yield found.wait_ready()
    found.process.kill()
    found.process.wait()


def _ranks(server: Served) -> tuple[int, int]:
    """The processes of rank 0, which is the engine core's, and of rank 1."""
    core = server.engine_pid
    (other,) = Path(f"/proc/{core}/task/{core}/children").read_text().split()
    return core, int(other)


def _text(server: Served) -> str:
    status, answer, _ = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


@pytest.mark.thorough
def test_a_killed_rank(server: Served, checkpoint: Path) -> None:
    """Nobody asks for anything, and yet it is noticed."""
    with LLM(checkpoint, **EAGER) as llm:
        expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    assert _text(server) == expected
    core, rank = _ranks(server)
    os.kill(rank, signal.SIGKILL)
    until(lambda: server.get("/health/ready")[0] == 503)
    assert f"rank 1 of 2 (process {rank}) was killed by signal 9" in server.get("/health/ready")[1]
    until(lambda: gone(core))
    until(lambda: server.get("/health/ready")[0] == 200)
    assert _text(server) == expected


@pytest.mark.slow
def test_the_core_and_the_front_are_killed(server: Served) -> None:
    """Whoever is left ends too, in the middle of a request; the front starts new ones."""
    expected = _text(server)
    core, rank = _ranks(server)
    long = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True}
    asking = threading.Thread(target=lambda: server.post("/v1/completions", long))
    asking.start()
    os.kill(core, signal.SIGKILL)
    asking.join(PATIENCE)
    assert not asking.is_alive()
    until(lambda: gone(core, rank))
    until(lambda: server.get("/health/ready")[0] == 200)
    assert not {core, rank} & set(_ranks(server))
    assert _text(server) == expected
    core, rank = _ranks(server)
    server.process.kill()  # nobody is left to end the others
    server.process.wait()
    until(lambda: gone(core, rank))
