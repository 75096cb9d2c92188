"""What tests on two GPUs share, and how several workers share a machine with a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from several_gpus import Compiled


@pytest.fixture(scope="module", autouse=True)
def cores_of_worker(worker_id: str) -> Iterator[None]:
    """On a machine with a GPU each worker has its share of the cores meanwhile, for transformers' models too: every
    process that compiles takes 0.5 GB of the one GPU, and there are as many as cores."""
    cores = sorted(os.sched_getaffinity(0))
    if worker_id != "master" and torch.cuda.is_available():
        number, count = int(worker_id.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, cores[number % len(cores) :: count])
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, len(os.sched_getaffinity(0))))  # more would wait for each other at every step
    yield
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)


@pytest.fixture(scope="session")
def compiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    made = Compiled(checkpoint, tmp_path_factory.mktemp("compiled"))
    try:
        made.wait()
        yield made
    finally:
        made.end()
