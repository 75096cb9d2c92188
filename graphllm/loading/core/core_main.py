"""The program of an engine core's own process: it loads the real core. `graphllm.engine.process.core_loop` has the
loop. Its argument, if any: how many ranks this machine will have; the others' processes are started first of all."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from graphllm.config import ConfigError, CoreConfig
from graphllm.engine.process.core_loop import run_core
from graphllm.engine.requests.request import Core
from graphllm.host.garbage_collection import keep_all, no_collections
from graphllm.host.machine import gpu_count
from graphllm.loading.core.rank_main import COMMAND
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.artifact import Artifact
from graphllm.runtime.ranks.rank_processes import WaitingRanks

if TYPE_CHECKING:
    from graphllm.loading.core.core_start import EarlyStart


_LOADERS = "graphllm.loading.core.loaders"
_EARLY, _LOAD = "graphllm.loading.core.early_start", "graphllm.loading.core.load"  # imported when there is time for it


class _Loading:
    """Makes the real engine core. Settings are a CoreConfig as plain JSON. waiting: processes for the other ranks."""

    def __init__(self, waiting: WaitingRanks | None) -> None:
        self._waiting, self._on_gpu = waiting, gpu_count() > 0
        self._begun: EarlyStart | None = None
        if self._on_gpu:  # now, because `begin` runs while others are imported
            importlib.import_module(_EARLY)

    def preload(self) -> None:
        """Import what loading needs."""
        # On a CPU most models need no torch.
        names = [_LOAD, f"{_LOADERS}.{'device' if self._on_gpu else 'host'}", "tokenizers"]
        with no_collections():
            for name in [*(("torch", "graphllm.weights.loading.loader") if self._on_gpu else ()), *names]:
                importlib.import_module(name)
        keep_all()

    def begin(self, settings: dict[str, Any]) -> None:
        """Begin what needs none of that. What is wrong with the settings `load` says."""
        if not self._on_gpu:
            return
        with contextlib.suppress(ConfigError, OSError):
            config = msgspec.convert(settings, CoreConfig)
            stored = StoredWeights(config, Artifact.trusted(Path(config.load.artifact)))
            self._begun = importlib.import_module(_EARLY).begin_early(stored)

    def load(self, settings: dict[str, Any], phase: Callable[[str, float], None]) -> Core:
        """The engine core."""
        config = msgspec.convert(settings, CoreConfig)
        load_core = importlib.import_module(_LOAD).load_core
        core: Core = load_core(config, phase, exits=True, waiting=self._waiting, begun=self._begun)
        return core


def main() -> None:
    """The process's whole life."""
    degree = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    loading = _Loading(WaitingRanks(COMMAND, degree - 1) if degree > 1 else None)
    run_core(loading.load, loading.preload, loading.begin)


if __name__ == "__main__":
    main()
