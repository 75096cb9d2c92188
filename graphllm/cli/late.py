"""Work of a command in a module that is imported when the command runs, as it may load torch."""

from __future__ import annotations

import importlib
from typing import Any


def call(target: str, *args: Any) -> Any:
    """Call a function with these arguments. target: "module:function", below `graphllm.cli`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"graphllm.cli.{module}"), name)(*args)
