"""The program of a rank's own process: it loads the rank's share. `graphllm.runtime.rank_process` has its life."""

from __future__ import annotations

import importlib
import sys

from graphllm.runtime.rank_process import run_rank

COMMAND = (sys.executable, "-m", "graphllm.entrypoints.rank_process")


def _preload() -> None:
    for name in ("torch", "graphllm.entrypoints.share", "graphllm.runtime.executor", "graphllm.weights.loader"):
        importlib.import_module(name)


if __name__ == "__main__":
    from graphllm.entrypoints.share import RankShare

    run_rank(RankShare, _preload)
