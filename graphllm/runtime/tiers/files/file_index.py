"""FileIndex: which keys have a file, in the order of their last use. No files of its own, and no lock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice


class FileIndex:
    """Keys, the least recently used first.

    news: what was added (True) or removed (False) since `take_news`, by key.
    used: when keys were last used, in nanoseconds since 1970, of those in use since `take_used`.
    """

    def __init__(self) -> None:
        self._added = OrderedDict[bytes, int]()  # by key: the number of its addition
        self._count = 0
        self.news = dict[bytes, bool]()
        self.used = dict[bytes, int]()

    def __len__(self) -> int:
        return len(self._added)

    def __contains__(self, key: bytes) -> bool:
        return key in self._added

    @property
    def additions(self) -> int:
        """How many there were, for `merge`."""
        return self._count

    def add(self, key: bytes, when: int) -> None:
        """A file was written, which also counts as a use."""
        self._count += 1
        if key not in self._added:
            self.news[key] = True
        self._added[key] = self._count
        self.use(key, when)

    def use(self, key: bytes, when: int) -> None:
        """A file was used; nothing where there is none."""
        if key in self._added:
            self._added.move_to_end(key)
            self.used[key] = when

    def remove(self, key: bytes) -> None:
        """A file is gone; nothing where there was none."""
        if self._added.pop(key, None) is not None:
            self.news[key] = False
            self.used.pop(key, None)

    def take_oldest(self, count: int) -> list[bytes]:
        """Remove the keys that were used the longest ago, and tell them; all where there are fewer."""
        keys = list(islice(self._added, max(0, count)))
        for key in keys:
            self.remove(key)
        return keys

    def merge(self, found: Mapping[bytes, int], additions: int) -> None:
        """What a look at the disk has found.

        found: when each file was used, by key, in nanoseconds.
        additions: of the index when the look began; what was added since may be missing in it.
        """
        for key in [key for key, added in self._added.items() if added <= additions and key not in found]:
            self.remove(key)
        new = sorted((when, key) for key, when in found.items() if key not in self._added)
        for _, key in reversed(new):  # to the front, the oldest last: what this process has used is newer
            self._added[key] = additions
            self._added.move_to_end(key, last=False)
            self.news[key] = True

    def clear(self) -> list[bytes]:
        """Remove all keys, and tell them."""
        keys = list(self._added)
        for key in keys:
            self.remove(key)
        return keys

    def take_news(self, most: int | None = None) -> tuple[list[bytes], list[bytes]]:
        """Keys that were added, and keys that were removed, since the last call; ``most`` in all, the others later."""
        news = {key: self.news[key] for key in islice(self.news, most)}
        for key in news:
            del self.news[key]
        return [key for key, there in news.items() if there], [key for key, there in news.items() if not there]

    def take_used(self) -> dict[bytes, int]:
        """When keys were last used, of those in use since the last call."""
        used, self.used = self.used, {}
        return used
