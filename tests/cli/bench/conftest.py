"""The whole of `bench serve` against a fake server, as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """serve(fake, **load): exit status and results of a run against it."""
    from graphllm.cli.bench.loads import Traffic
    from graphllm.cli.bench.serve import bench_serve
    from tests.cli.bench.fake_openai import Fake, serving_thread

    def run(fake: Fake, **load: Any) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "results.json"
        with serving_thread(fake):
            code = bench_serve(Traffic(fake.url, **load), output, True)
        return code, json.loads(output.read_text())

    return run
