"""What is said of a model that cannot be traced: its class, the line of its code, and the remedy."""

from __future__ import annotations

import traceback
from pathlib import Path

from graphllm.config import ConfigError

_REMEDY = "docs/adding-a-model.md shows how to write the model in a file of your own"


def refused(name: str, has: str, cause: BaseException | None = None) -> ConfigError:
    """The error for a class of transformers. has: what it has that is not served. cause: what was raised."""
    return ConfigError(
        f"transformers' {name} has {has}{where_of(cause) if cause else ''}, so it is not served; {_REMEDY}"
    )


def where_of(problem: BaseException) -> str:
    """The last line of transformers' models that an exception came through, " (modeling_x.py:12: code)"."""
    frames = traceback.extract_tb(problem.__traceback__)
    for frame in reversed(frames):
        if "/transformers/models/" in frame.filename:
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""
