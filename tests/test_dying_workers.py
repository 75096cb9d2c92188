"""A test that ends its worker is one failure: the run goes on, and ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
DIES = "import os\n\ndef test_first(): pass\n\ndef test_dies(): os._exit(9)\n\ndef test_last(): pass\n"


@pytest.mark.thorough
def test_all_others_run(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(DIES)
    options = ["-n", "2", "--dist", "loadfile", "--as-given", "-p", "tests.conftest", "-c", "/dev/null", "--rootdir"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "3 failed, 6 passed" in done.stdout
    assert len(re.findall(r"crashed while running '.*test_dies'", done.stdout)) == 3
