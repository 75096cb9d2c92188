"""What the methods of `LLM` share: progress in a terminal, Ctrl-C between steps, one argument or many."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from graphllm.config import ConfigError
from graphllm.config.requests.pooling_params import NO_POOLING, PoolingParams

_T = TypeVar("_T")
Bars = Callable[..., Any]  # makes a context manager with ``update``, as tqdm's class does
Show = bool | Bars


class _Bar:
    """Progress in a terminal, nothing elsewhere."""

    def __init__(self, total: int, desc: str) -> None:
        from rich import console, progress

        terminal = console.Console(stderr=True)
        self._view = progress.Progress(console=terminal, transient=True, disable=not terminal.is_terminal)
        self._task = self._view.add_task(desc, total=total)

    def __enter__(self) -> _Bar:
        self._view.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._view.stop()

    def update(self, count: int) -> None:
        """``count`` more are done."""
        self._view.advance(self._task, count)


def bars(show: Show) -> Bars | None:
    """What makes a progress bar; None for none."""
    if callable(show):
        return show
    if not isinstance(show, bool):
        raise ConfigError(f"use_tqdm is {show!r:.80}: give True, False or what makes a progress bar, such as tqdm.tqdm")
    return _Bar if show else None


class Interrupts:
    """Holds Ctrl-C back until `check`, because the middle of a step is no place to stop at; a second one goes
    through."""

    def __enter__(self) -> Interrupts:
        self._pressed = False
        handler = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        self._ours = main and handler is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, *_: object) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one."""
        if self._pressed:
            raise KeyboardInterrupt


def listed(prompts: Any) -> list[Any]:
    """The prompts of what `generate` takes: one, or a list of them."""
    return [prompts] if _is_one(prompts) else list(prompts)


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))


def each(name: str, given: _T | Sequence[_T], kind: type[_T], count: int) -> list[_T]:
    """One for each prompt."""
    if not isinstance(given, (kind, Sequence)):
        why = NO_POOLING if isinstance(given, PoolingParams) else f"give {kind.__name__}, or a list of them"
        raise ConfigError(f"{name} is {given!r:.80}: {why}")
    found = [given] * count if isinstance(given, kind) else list(cast(Sequence[_T], given))
    if len(found) != count:
        raise ConfigError(f"{name} has {len(found)} entries and there are {count} prompts: give one for each")
    return found
