"""What tests on two GPUs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.several_gpus import Compiled
from tests.tiers import ON_GPU

collect_ignore_glob = [] if ON_GPU else ["test_*.py"]  # test_suite.py imports them


@pytest.fixture(scope="session")
def compiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    made = Compiled(checkpoint, tmp_path_factory.mktemp("compiled"))
    try:
        made.wait()
        yield made
    finally:
        made.end()
