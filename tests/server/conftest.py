"""What the tests of the server share: the embedded model's artifact, and a server of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]

from live import Served  # noqa: E402

from graphllm.embedded import MODEL_DIR  # noqa: E402


def _compile(folder: Path) -> None:
    from graphllm.compile.pipeline import compile_model
    from graphllm.config import EngineArgs
    from graphllm.entrypoints.resolve import compile_config
    from graphllm.entrypoints.source import open_source

    source = open_source(MODEL_DIR)
    config = compile_config(source.config, EngineArgs(target="cpu"))
    compile_model(source.config, source.tensors, config, folder)


@pytest.fixture(scope="session")
def embedded_artifact(shared: Any) -> Path:
    """The embedded model, compiled with the defaults."""
    return shared("embedded-served", _compile)


@pytest.fixture(scope="session")
def served(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the embedded model for tests that leave it as it was."""
    server = Served(tmp_path_factory.mktemp("served") / "log", "--artifact", embedded_artifact)
    yield server.wait_ready()
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def serve(embedded_artifact: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """serve(*options): a server of its own for one test."""
    running: list[Served] = []

    def start(*options: object, **environment: str) -> Served:
        log = tmp_path / f"log-{len(running)}"
        running.append(Served(log, "--artifact", embedded_artifact, *options, environment=environment))
        return running[-1]

    yield start
    for server in running:
        server.process.kill()
        server.process.wait()
