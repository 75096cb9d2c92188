"""The program of an engine core's own process: it loads the real core. `graphllm.engine.process` has the loop."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from graphllm.engine.process import run_core
from graphllm.engine.request import Core


def _load(settings: dict[str, Any], phase: Callable[[str, float], None]) -> Core:
    """The real engine core; settings: a CoreConfig as plain JSON."""
    from graphllm.config import CoreConfig
    from graphllm.entrypoints.core import load_core

    return load_core(msgspec.convert(settings, CoreConfig), phase, exits=True)


def _preload() -> None:
    for name in ("torch", "graphllm.entrypoints.core", "graphllm.engine.core", "graphllm.weights.loader", "tokenizers"):
        importlib.import_module(name)


if __name__ == "__main__":
    run_core(_load, _preload)
