"""How tiles of the block types of GGUF files are laid out, as data: `graphllm.ops.encodings.gguf_blocks` says what they
are. No torch."""

from __future__ import annotations

from typing import NamedTuple

ROWS = 16  # of a tile


class Field(NamedTuple):
    """Bytes of a block, and of a unit. bits: single bits of 32 entries, in order: of a unit's byte q, bit p is that of
    entry 4 p + q in a tile."""

    nbytes: int
    unit: int
    bits: bool = False


class Tiled(NamedTuple):
    """A type with kernels. entries: of a block."""

    entries: int
    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        """Of a block."""
        return sum(f.nbytes for f in self.fields)


_SCALE, _BITS = Field(2, 2), Field(4, 4, bits=True)
TILED = {
    "q8_0": Tiled(32, (_SCALE, Field(32, 4))),
    "q4_0": Tiled(32, (_SCALE, Field(16, 4))),
    "q4_1": Tiled(32, (_SCALE, _SCALE, Field(16, 4))),
    "q5_0": Tiled(32, (_SCALE, _BITS, Field(16, 4))),
    "q5_1": Tiled(32, (_SCALE, _SCALE, _BITS, Field(16, 4))),
    "q4_k": Tiled(256, (_SCALE, _SCALE, Field(12, 1), Field(128, 4))),
    "q5_k": Tiled(256, (_SCALE, _SCALE, Field(12, 1), Field(32, 4), Field(128, 4))),
    "q6_k": Tiled(256, (Field(128, 4), Field(64, 4), Field(16, 1), _SCALE)),
}
"""The types that kernels read, by name; the fields are ggml's, in its order."""
