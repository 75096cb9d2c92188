"""How a command ends: one line on stderr, and the exit status.

0: done, every request has an answer. 1: some have none, or the results cannot be written. 2: a mistake of the user;
nothing was run. 130, 143, 129: stopped by Ctrl-C, SIGTERM, SIGHUP. 141: nobody reads the output any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from graphllm.config import ConfigError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CommandError(Exception):
    """A command ends before its work is done, for a reason that is no mistake of the user."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def endings() -> Iterator[None]:
    """Turn what can end a command into a line and a status."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ConfigError as mistake:
        _end(str(mistake), 2)
    except CommandError as end:
        _end(str(end), end.status)
    except KeyboardInterrupt as stop:
        _end("interrupted", stopped_status(stop))
    except OSError as failure:
        if failure.errno == errno.EPIPE:
            _drop_output()
            sys.exit(128 + signal.SIGPIPE)
        if failure.errno not in _NO_ROOM:
            if failure.filename is None:
                raise
            _end(f"{failure.filename!s:.200}: {failure.strerror}; give another path", 2)
        _drop_output()
        _end(f"cannot write {failure.filename or 'the output'}: {failure.strerror}", 1)


def _end(message: str, status: int) -> None:
    print(f"graphllm: {message}", file=sys.stderr)
    sys.exit(status)


def _drop_output() -> None:
    """What stdout still holds would fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP come as KeyboardInterrupt, as Ctrl-C does, unless they are ignored or handled already."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def stopped_status(stop: KeyboardInterrupt) -> int:
    """The exit status of a command that a signal stopped, as shells have it."""
    return 128 + (stop.args[0] if stop.args else signal.SIGINT)
