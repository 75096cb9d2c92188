"""The ops, in families: one folder an op. ``from graphllm.ops import linear`` finds an op in whatever family it is."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    for folder in __path__:
        for found in Path(folder).glob(f"*/{name}/op.py"):
            return getattr(importlib.import_module(f"{__name__}.{found.parts[-3]}.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no op {name!r}")
