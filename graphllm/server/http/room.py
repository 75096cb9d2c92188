"""Memory for large bodies, which all connections share: who finds none waits, in the order in which they came."""

from __future__ import annotations

import asyncio
import contextlib


class Room:
    """size: in bytes, for all of them together."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._line = asyncio.Lock()
        self._given_back = asyncio.Event()

    async def take(self, size: int, held: contextlib.ExitStack) -> None:
        """Wait for this many bytes, or for all if it is more. They are free again when ``held`` is closed."""
        size = min(size, self._size)
        async with self._line:
            while self._free < size:
                self._given_back.clear()
                await self._given_back.wait()
            self._free -= size
        held.callback(self._give, size)

    def _give(self, size: int) -> None:
        self._free += size
        self._given_back.set()
