"""Digests of prompts: what the prefix cache finds contents by.

A chain of SHA-256 over blocks of tokens, so that each digest stands for everything before it. Its beginning depends on
all else that a cached state depends on: the adapter, the request's salt, inputs that all tokens see. An encoded input
that replaces tokens enters with the block in which it begins.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.requests.request_table import RequestState


class PrefixHasher:
    """Makes the digests of a sequence's blocks.

    block_size: tokens between two digests.
    secret: processes with the same secret and the same ``layout`` have the same digests. Without a secret nobody knows
    the digests, so that no prompt can be made to collide.
    layout: of the cache groups.
    ahead: tokens after a block on which its contents depend, too.
    """

    def __init__(
        self, block_size: int, secret: str | None = None, layout: Sequence[tuple[object, ...]] = (), ahead: int = 0
    ) -> None:
        self.block_size, self._ahead = block_size, ahead
        given = secrets.token_hex(32) if secret is None else secret
        self._key = hashlib.sha256(repr((given, block_size, ahead, *map(tuple, layout))).encode()).digest()

    @property
    def fingerprint(self) -> bytes:
        """Equal where all digests are; it tells nothing of the secret that somebody could use."""
        return hashlib.sha256(b"fingerprint" + self._key).digest()

    def root(self, request: EngineRequest) -> bytes:
        """Of no tokens of a request."""
        seen_by_all = [item.content_hash for item in request.items if item.position < 0]
        adapter = "" if request.adapter is None else request.adapter.digest
        return hashlib.sha256(self._key + repr((request.cache_salt, adapter, seen_by_all)).encode()).digest()

    def digest(self, state: RequestState, num_tokens: int) -> None:
        """Extend a sequence's chain to the full blocks of that many tokens."""
        have, size = len(state.digests), self.block_size
        if num_tokens // size > have:
            tokens = state.tokens(have * size, num_tokens // size * size + self._ahead)
            self.extend(state.request, state.digests, tokens)

    def extend(self, request: EngineRequest, chain: list[bytes], tokens: Sequence[int]) -> None:
        """Append the digests of the full blocks that these tokens make. They follow the chain so far; the last
        ``ahead`` tokens only have to be known."""
        size, before = self.block_size, chain[-1] if chain else self.root(request)
        ids = array("i", tokens).tobytes()
        items: dict[int, list[tuple[int, str]]] = {}
        for item in request.items:
            if item.position >= 0:
                items.setdefault(item.position // size, []).append((item.position % size, item.content_hash))
        seen = 4 * (size + self._ahead)
        for at in range(0, len(ids) - seen + 1, 4 * size):
            content = self._key + before + ids[at : at + seen]
            if begun := items.get(len(chain)):
                content += repr(sorted(begun)).encode()
            before = hashlib.sha256(content).digest()
            chain.append(before)
