"""How tests wait: until something is so. The seconds here only end a test that hangs; no test asserts any."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds; also for the timeouts of clients and processes
_PAUSE = 0.01  # seconds between two looks


def until(look: Callable[[], Any], *, process: subprocess.Popen[Any] | None = None, what: Any = "") -> Any:
    """What ``look`` returns once it is true. process: its end is a failure. what: of a failure, a text or its maker."""
    end = time.monotonic() + PATIENCE
    while True:
        ended = process and process.poll()
        if found := look():
            return found
        _check(end, ended, what)
        time.sleep(_PAUSE)


async def until_async(look: Callable[[], Any], *, what: Any = "") -> Any:
    """The same on an event loop; ``look`` may be a coroutine function."""
    end = time.monotonic() + PATIENCE
    while True:
        found = look()
        if found := await found if inspect.isawaitable(found) else found:
            return found
        _check(end, None, what)
        await asyncio.sleep(_PAUSE)


def _check(end: float, ended: int | None, what: Any) -> None:
    if ended is not None or time.monotonic() > end:
        why = "not within the patience of tests" if ended is None else f"its process ended with {ended}"
        raise AssertionError(f"{why}: {what() if callable(what) else what}")


def gone(*pids: int) -> bool:
    """Whether none of these processes is left, nor a zombie that its parent has to reap."""
    return not any(map(_is_left, pids))


def _is_left(pid: int) -> bool:
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (state, parent) != ("Z", "1")
    except (FileNotFoundError, ProcessLookupError):
        return False
