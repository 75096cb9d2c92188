"""PeerLease: what another engine has of the contents that a request needs, for as long as they are copied."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.transfer.frames import Check, Find, Found, Frames, Hello, Lost, Places, Refused, Welcome
from graphllm.engine.transfer.meeting_folder import connect

_SLACK = 5.0  # seconds for an answer, in addition to what the other engine waits for contents


class PeerError(Exception):
    """Another engine gives nothing; the message says why."""


class PeerLease:
    """A connection to an engine that has found contents. Not for several threads at a time.

    engine: its id.
    keys: that were asked for.
    entries: of the peer's host memory, by the key of what there is.
    known: the peer has kept the request's contents.
    places: of its memory; the descriptors are this process's own.
    """

    def __init__(
        self, folder: Path, engine: str, own: Hello, request: str, keys: list[Key], patience: float, most_files: int
    ) -> None:
        """Ask an engine. most_files: descriptors that it may give. Raises PeerError."""
        self.engine, self.keys = engine, keys
        self._descriptors = list[int]()
        try:
            self._frames = Frames(connect(folder, engine, patience + _SLACK))
        except OSError as failure:
            raise PeerError(f"engine {engine!r:.80} is not there ({failure.strerror or failure})") from failure
        try:
            self.places, self.entries, self.known = self._ask(own, request, most_files)
        except (OSError, PeerError) as failure:
            self.close()
            raise PeerError(f"engine {engine!r:.80} gives nothing: {failure}") from failure

    def _ask(self, own: Hello, request: str, most_files: int) -> tuple[Places, dict[Key, int], bool]:
        frames = self._frames
        frames.send(own)
        welcome = frames.answer(self._descriptors, most_files)
        if isinstance(welcome, Refused):
            raise PeerError(welcome.message)
        frames.send(Find(request, self.keys))
        found = frames.answer()
        if not isinstance(welcome, Welcome) or not isinstance(found, Found):
            raise PeerError("it says something else than was asked")
        numbers = iter(self._descriptors)
        places: Places = [{kind: (next(numbers), of) for kind, of in rank.items()} for rank in welcome.shapes]
        entries = {key: entry for key, entry in zip(self.keys, found.entries, strict=True) if entry >= 0}
        return places, entries, found.known

    def lost(self) -> set[Key] | None:
        """What was there no more when it had been copied; None where the engine is gone, so that nobody knows."""
        try:
            self._frames.send(Check())
            answer = self._frames.answer()
        except OSError:
            return None
        return {self.keys[at] for at in answer.at} if isinstance(answer, Lost) else None

    def close(self) -> None:
        """The peer need not keep the request's contents any more."""
        self._frames.close()
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())
