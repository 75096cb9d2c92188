"""Objects of users' by their names, and how processes that this one starts find them. Imports no torch."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from graphllm.config import ConfigError


def import_path() -> str:
    """What PYTHONPATH must be for another process to find the modules that this one finds."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def imported(setting: str, name: str) -> Any:
    """The object named "package.module:name", or "package.module.name". Raises ConfigError when there is none."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as missing:
        remedy = "put it into a module next to the script" if module == "__main__" else "give package.module:name"
        raise ConfigError(f"{setting}: {name!r} cannot be imported ({missing}); {remedy}") from missing


def name_of(setting: str, found: Any) -> str:
    """The name under which another process finds a class or a function. Raises ConfigError for one that is not at the
    top of a module."""
    name = getattr(found, "__qualname__", type(found).__qualname__)
    if not name.isidentifier():
        raise ConfigError(f"{setting} is {name}: put it at the top of a module")
    return f"{found.__module__}:{name}"
