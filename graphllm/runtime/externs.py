"""Extern routines: functions that programs call by name, with tensors that the program lists and the memory plan
places: collectives, library calls. Packages offer theirs under the entry point group ``graphllm.externs``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from graphllm.config import ConfigError

GROUP = "graphllm.externs"


@cache
def routine(name: str) -> Callable[..., Any]:
    """The function of that name. Raises ConfigError where no package offers it."""
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise ConfigError(f"the artifact calls the extern routine {name!r}, which no installed package offers; install it")
