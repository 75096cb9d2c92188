"""PeerLease: what another engine has of the contents that a request needs, for as long as they are copied."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.transfer.frames import Challenge, Check, Find, Found, Frames, Lost, Refused, Welcome
from graphllm.engine.transfer.peer_identity import Address, PeerIdentity

_SLACK = 5.0  # seconds for an answer, in addition to what the other engine waits for contents


class PeerError(Exception):
    """Another engine gives nothing; the message says why."""


class PeerLease:
    """A connection to an engine that has found contents. Not for several threads at a time.

    engine: its id.
    keys: that were asked for.
    entries: of the peer's host memory, by the key of what there is.
    known: the peer has kept the request's contents.
    ranks: what its ranks say of themselves; the descriptors of their files are this process's own.
    """

    def __init__(
        self, called: Address, connect: Callable[[Address, float], socket.socket], own: PeerIdentity, request: str,
        keys: list[Key], patience: float, most_files: int,
    ) -> None:  # fmt: skip
        """Ask an engine. most_files: descriptors that it may give. Raises PeerError."""
        self.engine, self.keys = called.engine_id, keys
        self._descriptors = list[int]()
        try:
            self._frames = Frames(connect(called, patience + _SLACK))
        except OSError as failure:
            raise PeerError(f"engine {self.engine!r:.80} is not there ({failure.strerror or failure})") from failure
        try:
            self.ranks, self.entries, self.known = self._ask(called, own, request, most_files)
        except (OSError, PeerError) as failure:
            self.close()
            raise PeerError(f"engine {self.engine!r:.80} gives nothing: {failure}") from failure

    def _ask(
        self, called: Address, own: PeerIdentity, request: str, most_files: int
    ) -> tuple[list[dict[str, Any]], dict[Key, int], bool]:
        frames = self._frames
        challenge = frames.answer()
        if not isinstance(challenge, Challenge):
            raise PeerError("it says something else than its challenge")
        hello = own.hello(challenge, called)
        frames.send(hello)
        welcome = frames.answer(self._descriptors, most_files)
        if isinstance(welcome, Refused):
            raise PeerError(welcome.message)
        if not isinstance(welcome, Welcome) or not own.trusts(welcome, hello, called):
            raise PeerError("it does not know the cache_secret")
        frames.send(Find(request, self.keys))
        found = frames.answer()
        if not isinstance(found, Found):
            raise PeerError("it says something else than was asked")
        numbers = iter(self._descriptors)
        ranks = [
            {**rank, "pid": os.getpid(), "files": {kind: next(numbers) for kind in rank["files"]}}
            if "files" in rank
            else rank
            for rank in welcome.ranks
        ]
        entries = {key: entry for key, entry in zip(self.keys, found.entries, strict=True) if entry >= 0}
        return ranks, entries, found.known

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
