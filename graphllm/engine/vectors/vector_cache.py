"""The vectors of whole prompts that a core keeps, of a model with one for each token: a document that is ranked again,
by late interaction with another query, is not computed again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from graphllm.engine.requests.request import EngineRequest


class KeptVectors:
    """The most recently used vectors. most: bytes that they may take."""

    def __init__(self, most: int) -> None:
        self._most, self.size = most, 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, request: EngineRequest) -> bytes | None:
        """The vectors of an equal request."""
        key = _key(request)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, request: EngineRequest, vectors: bytes) -> None:
        """What a request has got; the oldest go for it."""
        key = _key(request)
        if len(vectors) > self._most or key in self._kept:
            return
        self._kept[key] = vectors
        self.size += len(vectors)
        while self.size > self._most:
            _, gone = self._kept.popitem(last=False)
            self.size -= len(gone)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self.size = 0


def _key(request: EngineRequest) -> bytes:
    """Of all that the vectors depend on, and of who may share them."""
    adapter = request.adapter.digest if request.adapter is not None else ""
    words = f"{request.second} {adapter} {request.cache_salt}".encode()
    return hashlib.blake2b(array("q", request.prompt).tobytes() + words, digest_size=32).digest()
