"""Once compiled, an artifact starts without a compiler, writes nothing and imports nothing that could compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE

# Runs the command line in its process, then reports what was imported. Opening a file for writing is an error.
SCRIPT = """
import json, sys
def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and not arguments[0].startswith(("/dev/", "/proc/")):
        mode, flags = arguments[1] or "", arguments[2] or 0
        assert not set(mode) & set("wax+") and not flags & 3, f"opened for writing: {arguments}"
    assert event not in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.mkdir", "os.rename"), (event, arguments)
sys.addaudithook(audit)
from graphllm.cli import main
try:
    main()
finally:
    names = ("torch", "torch._inductor", "torch._dynamo", "triton", "transformers", "graphllm.compile")
    names += ("graphllm.model_defs",)
    print(json.dumps([n for n in names if n in sys.modules]), file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["compiled", "eager"])
def test_second_start(
    kind: str, checkpoint: Path, compiled_artifact: Path, eager_artifact: Path, tmp_path: Path, cli: Any, listing: Any
) -> None:
    artifact = compiled_artifact if kind == "compiled" else eager_artifact
    arguments = ["run", "--model", checkpoint, "--artifact", artifact, "--prompt", "hello world", "--temperature", 0]
    arguments += ["--max-tokens", 20, "--quiet"]
    first = cli(*arguments)
    assert first.code == 0

    (tmp_path / "empty").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "GRAPHLLM", "TORCH"))} | {
        "PATH": str(tmp_path / "empty"), "HOME": str(tmp_path / "empty"), "TMPDIR": str(tmp_path / "empty"),
        "GRAPHLLM_CACHE": str(tmp_path / "empty" / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    folders = (artifact, checkpoint, tmp_path / "empty")
    before = [listing(f) for f in folders]
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == first.out
    assert [listing(f) for f in folders] == before
    imported = json.loads(done.stderr.splitlines()[-1])
    # The eager backend needs the ops themselves, and with them their Triton kernels where Triton is installed. Compiled
    # programs of a CPU are kernels throughout.
    assert [n for n in imported if n != "triton"] == ([] if kind == "compiled" else ["torch"])
    assert kind == "eager" or "triton" not in imported
