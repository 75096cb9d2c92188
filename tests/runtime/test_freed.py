"""What an engine gives back when it is closed, in a process whose torch was imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = f"""
import gc, json, sys, weakref
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.engine.harness import finish, open_core, request
assert "torch" not in sys.modules
core = open_core(*map(Path, sys.argv[1:]))
tokens = finish(core, [request("r", [5, 9, 77, 31])])["r"].tokens
held = [weakref.ref(weight) for weight in core.executor.worker.weights.values()]
core.close()
gc.collect()
print(json.dumps([len(tokens), len(held), sum(weight() is not None for weight in held)]))
"""


def test_weights_go_when_the_engine_is_closed(eager_artifact: Path, checkpoint: Path) -> None:
    """Although ``core`` is still there."""
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(eager_artifact)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    tokens, weights, held = json.loads(done.stdout.splitlines()[-1])
    assert (tokens, held) == (24, 0)
    assert weights > 10
