"""What libraries read when they are loaded is set by `import graphllm`, unless the user has set it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SEEN = """
import os, sys
class Seen:
    def find_spec(self, name, *more):
        if name == "torch":
            sys.exit(print(os.environ.get("GOMP_SPINCOUNT")))
sys.meta_path.insert(0, Seen())
"""


@pytest.mark.parametrize(("own", "found"), [(None, "60000"), ("7", "7")])
@pytest.mark.parametrize("package", ["graphllm", "graphllm.cli", "graphllm.entrypoints.llm"])
def test_waits_of_openmp_are_bounded(own: str | None, found: str, package: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env |= {"GOMP_SPINCOUNT": own} if own else {}
    run = f"{SEEN}\nimport {package}\nimport torch"
    done = subprocess.run([sys.executable, "-c", run], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"
