"""Lets the tests here import fake_openai, and gives the whole of `bench serve` against it as a function."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """serve(fake, **load): exit status and results of a run against it."""
    from fake_openai import Fake, serving_thread

    from graphllm.cli.bench.serve import Load, bench_serve

    def run(fake: Fake, **load: Any) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "results.json"
        with serving_thread(fake):
            code = bench_serve(Load(fake.url, **load), output, True)
        return code, json.loads(output.read_text())

    return run
