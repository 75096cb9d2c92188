"""Where programs of save_snapshots and load_snapshots find their tile of a state and their part of what is copied."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 8192  # of a tile
WORDS = tl.constexpr(2048)  # that a program copies


@triton.jit
def copy_words(from_ptr, to_ptr, part, B: tl.constexpr):
    """A part of B words."""
    at = part * WORDS + tl.arange(0, WORDS)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < B), mask=at < B)


@triton.jit
def tile_places(tile, H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile with GROUPS scales of one of a slot's states: the state's number, places of its numbers in that state,
    [ROWS, GROUPS], which of them there are, and the numbers of the scales."""
    TILES: tl.constexpr = (H * C + GROUPS - 1) // GROUPS
    number = tile // TILES
    g = (tile - number * TILES) * GROUPS + tl.arange(0, GROUPS)
    r = tl.arange(0, ROWS)
    places = (g // C * (R * C) + g % C)[None, :] + (r * C)[:, None]
    inside = (r < R)[:, None] & (g < H * C)[None, :]
    return number, places, inside, g


def sizes_of(kind: Tensor, words: int) -> dict[str, int]:
    """Constants of the kernels, and in TILES how many tiles there are. kind: states or codes [_, ..., L, H, R, C]."""
    L, H, R, C = kind.shape[-4:]
    rows = triton.next_power_of_2(R)
    groups = max(16, min(triton.next_power_of_2(H * C), ELEMENTS // rows))
    return {"H": H, "R": R, "C": C, "B": words, "GROUPS": groups, "ROWS": rows, "TILES": L * -(-H * C // groups)}


def programs_of(sizes: dict[str, int]) -> int:
    """Programs for one pair."""
    return sizes["TILES"] + -(-sizes["B"] // WORDS.value)
