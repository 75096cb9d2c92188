"""The program of a rank's own process: it loads the rank's share. `graphllm.runtime.ranks.rank_process` has its
life."""

from __future__ import annotations

import importlib
import sys

from graphllm.runtime.ranks.rank_process import run_rank

COMMAND = (sys.executable, "-m", "graphllm.loading.core.rank_main")


def _preload() -> None:
    for name in ("torch", "graphllm.loading.core.rank", "graphllm.runtime.executor", "graphllm.weights.loading.loader"):
        importlib.import_module(name)


if __name__ == "__main__":
    from graphllm.loading.core.rank import RankShare

    run_rank(RankShare, _preload)
