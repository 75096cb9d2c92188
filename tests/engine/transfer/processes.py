"""An engine for prompts in a process of its own, and one that goes on with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphllm import LLM
from tests.engine.transfer.engines import asking

PROMPTS = [[(k * i) % 89 + 1 for i in range(60)] for k in (3, 5, 7, 11, 13, 17)]


class Producer:
    """An engine for prompts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        words = [sys.executable, "-m", "tests.engine.transfer.producer", json.dumps(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[3],
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def prefilled(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """The kv_transfer_params of each."""
        assert self.process.stdin is not None
        found = []
        for prompt in prompts:
            self.process.stdin.write(json.dumps(prompt) + "\n")
            self.process.stdin.flush()
            found.append(json.loads(self._read()))
        return found

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def run(llm: LLM, given: Sequence[dict[str, Any]]) -> tuple[list[list[int]], list[int]]:
    """The texts of all prompts, and how many tokens of each were not computed."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], [asking(12, **params) for params in given])
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens or 0 for o in outputs]
