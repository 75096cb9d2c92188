"""The program of an engine core's own process: it loads the real core. `graphllm.engine.process` has the loop. Its
argument, if any: how many ranks this machine will have; the others' processes are started first of all."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from graphllm.engine.process import run_core
from graphllm.engine.request import Core
from graphllm.entrypoints.rank_process import COMMAND
from graphllm.machine import gpu_count
from graphllm.runtime.rank_processes import WaitingRanks


def _load(waiting: WaitingRanks | None, settings: dict[str, Any], phase: Callable[[str, float], None]) -> Core:
    """The real engine core; settings: a CoreConfig as plain JSON."""
    from graphllm.config import CoreConfig
    from graphllm.entrypoints.core import load_core

    return load_core(msgspec.convert(settings, CoreConfig), phase, exits=True, waiting=waiting)


def _preload() -> None:
    names = ["graphllm.entrypoints.core", "graphllm.engine.core", "graphllm.runtime.executor", "tokenizers"]
    # On a CPU most models need no torch (`graphllm.entrypoints.host`).
    for name in [*(("torch", "graphllm.weights.loader") if gpu_count() else ()), *names]:
        importlib.import_module(name)


def main() -> None:
    """The process's whole life."""
    degree = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    waiting = WaitingRanks(COMMAND, degree - 1) if degree > 1 else None
    run_core(functools.partial(_load, waiting), _preload)


if __name__ == "__main__":
    main()
