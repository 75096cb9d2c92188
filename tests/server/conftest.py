"""What the tests of the server share: the embedded model's artifact, and a server of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.artifacts import artifact_of
from tests.server.live import Served


@pytest.fixture(scope="session")
def embedded_artifact() -> Path:
    """The embedded model, compiled with the defaults."""
    return artifact_of(None)


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
