"""What tests on two GPUs share, and how several workers share a machine with a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from several_gpus import Compiled


@pytest.fixture(scope="session", autouse=True)
def cores_of_worker(worker_id: str) -> None:
    """Each worker has its share of the machine's cores: every process that compiles takes 0.5 GB of the one GPU, and
    there are as many as cores."""
    if worker_id != "master":
        cores = sorted(os.sched_getaffinity(0))
        number, count = int(worker_id.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, cores[number % len(cores) :: count])


@pytest.fixture(scope="session")
def compiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    made = Compiled(checkpoint, tmp_path_factory.mktemp("compiled"))
    try:
        made.wait()
        yield made
    finally:
        made.end()
