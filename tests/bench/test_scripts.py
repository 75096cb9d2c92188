"""Every benchmark can be loaded: names that moved are found here, not on the lent machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.thorough
def test_all_load() -> None:
    names = sorted(p.stem for p in BENCH.glob("*.py") if not p.stem.startswith("__"))
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code, *names], cwd=BENCH, check=True, timeout=PATIENCE)
