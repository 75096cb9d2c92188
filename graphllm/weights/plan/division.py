"""What one of the ranks of a tensor-parallel group has of a dimension of a weight. No torch."""

from __future__ import annotations

from typing import NamedTuple


class WeightPart(NamedTuple):
    """Entries that are divided by themselves. length: how many there are. each: how many a rank has. same: consecutive
    ranks that have the same ones."""

    length: int
    each: int
    same: int


class Division(NamedTuple):
    """How ranks divide a weight.

    dim: the dimension that is divided.
    pieces: of that dimension, one after the other; the last rank's share is filled up with zeros after the last piece.
    """

    dim: int
    pieces: tuple[WeightPart, ...]

    @property
    def whole(self) -> int:
        """Entries of all ranks together."""
        return sum(piece.length for piece in self.pieces)

    @property
    def own(self) -> int:
        """Entries of one rank."""
        return sum(piece.each for piece in self.pieces)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Which of all entries a rank has, from and to, the first of each piece first."""
        found, start = [], 0
        for length, each, same in self.pieces:
            end = start + length
            first = min(start + rank // same * each, end)
            found.append((first, min(first + each, end)))
            start = end
        return found
