"""The program of a rank's own process: it loads the rank's share. `graphllm.runtime.ranks.rank_process` has its
life."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from graphllm.runtime.ranks.rank_process import Settings, run_rank

_RANK = "graphllm.loading.core.rank"  # imports torch
COMMAND = (sys.executable, "-m", "graphllm.loading.core.rank_main")


def _preload() -> None:
    for name in ("torch", _RANK, "graphllm.runtime.executor", "graphllm.weights.loading.loader"):
        importlib.import_module(name)


def _share(settings: Settings) -> Any:
    """What `_preload` has imported."""
    return importlib.import_module(_RANK).RankShare(settings)


if __name__ == "__main__":
    run_rank(_share, _preload)
