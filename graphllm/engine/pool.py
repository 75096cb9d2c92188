"""BlockPool: the pages of the cache, who holds them, and which hold what a later request may share.

A page holds P tokens in every layer of one cache group. Pages that nobody holds stay findable by their content until
they are given out again, the least recently used first.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable

Key = tuple[int, bytes]  # cache group, digest of the tokens up to the page's end


class BlockPool:
    """pages: how many, page 0 among them, which is never given out. caching: whether contents are remembered.

    secret: key of the digests; by default one that nobody can know, so that no prompt can be made to collide.
    """

    def __init__(self, pages: int, caching: bool, secret: bytes | None = None) -> None:
        self.caching = caching
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, pages))
        self.references = [0] * pages
        self._key_of: list[Key | None] = [None] * pages
        self._cached: dict[Key, int] = {}

    @property
    def free_blocks(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self) -> int:
        """A page for one holder; what it held is forgotten. Raises KeyError when there is none."""
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self.references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page, which may be free and cached."""
        if self.references[page] == 0:
            del self._free[page]
        self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each page. Give a sequence's last page first: it is then the first to be reused."""
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free[page] = None
                if self._key_of[page] is None:
                    self._free.move_to_end(page, last=False)

    def exclusive(self, page: int) -> bool:
        """Whether its only holder may write into it."""
        return self.references[page] == 1 and self._key_of[page] is None

    def find(self, group: int, digest: bytes) -> int:
        """The page with that content, 0 when there is none."""
        return self._cached.get((group, digest), 0)

    def store(self, page: int, group: int, digest: bytes) -> None:
        """Remember what a full page holds. Of two pages with one content, the first stays the one that is found."""
        key = (group, digest)
        if self._key_of[page] is None and key not in self._cached:
            self._cached[key] = page
            self._key_of[page] = key

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        if key is not None:
            del self._cached[key]
            self._key_of[page] = None

    def digest(self, before: bytes, tokens: bytes, salt: str = "") -> bytes:
        """Of all tokens up to a page's end: from that of the page before (b"" for the first, which takes the salt) and
        its own token ids as int32 bytes."""
        head = before or hashlib.sha256(salt.encode()).digest()
        return hashlib.sha256(self._secret + head + tokens).digest()

    def reset_cache(self) -> bool:
        """Forget all contents; False, and nothing done, while any page is held."""
        if len(self._free) != len(self.references) - 1:
            return False
        for page in list(self._cached.values()):
            self._forget(page)
        return True
