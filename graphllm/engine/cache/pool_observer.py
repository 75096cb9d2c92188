"""PoolObserver: hears which contents of a pool of blocks can be found, and which no more."""

from __future__ import annotations


class PoolObserver:
    """Every method has an empty default, runs in the core's thread, and returns at once.

    key: of the contents, (cache group, digest); the group is 0 in a pool of snapshots.
    """

    def stored(self, block: int, key: tuple[int, bytes]) -> None:
        """A block can be found by its contents. A step in flight may still write them."""

    def evicted(self, block: int, key: tuple[int, bytes]) -> None:
        """A block has a new holder, and can be found no more. Its contents are there until the next command or step
        that writes it."""

    def outdated(self, key: tuple[int, bytes]) -> None:
        """Contents that were evicted are hardly wanted any more."""

    def cleared(self) -> None:
        """No block can be found any more."""

    def copied(self, medium: str, key: tuple[int, bytes]) -> None:
        """A tier behind the device has a copy of these contents. medium: "CPU" for host memory, "STORAGE" for disks."""

    def dropped(self, medium: str, key: tuple[int, bytes]) -> None:
        """That copy is gone."""
