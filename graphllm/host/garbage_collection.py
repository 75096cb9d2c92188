"""When Python looks for garbage: not while it imports and makes what stays for good. It would walk through all of that
again and again, a sixth of the time."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Within the context, Python does not look for garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def keep_all() -> None:
    """What there is now is never looked through, until the process ends: for modules that were imported, a hundred
    milliseconds each time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report what is not collected in the end
