"""Formats of quantized weight matrices: what the weight plan, the loader and the pass need to know of each. No torch.

A format is numbers and nothing else. What they mean is the docstring of the op that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 16  # rows that lie side by side in a packed matrix


@dataclass(frozen=True)
class Format:
    """Weights as integers of ``bits`` bits with one scale for each ``group`` of inner entries of a row, packed for
    `quant_linear`. dtype: of the packed integers."""

    name: str
    bits: int
    group: int
    dtype: str

    def values_shape(self, rows: int, inner: int) -> tuple[int, ...]:
        """Of the packed matrix: blocks of rows, groups, lines of a group, rows of a block, bytes of a line and row."""
        blocks, groups = self.scales_shape(rows, inner)[:2]
        return (blocks, groups, self.group * self.bits // 32, BLOCK, 4)

    def scales_shape(self, rows: int, inner: int) -> tuple[int, int, int]:
        """Of the scales: blocks of rows, groups, rows of a block."""
        return (-(-rows // BLOCK), -(-inner // self.group), BLOCK)


# int8 with 64 entries a scale is 8.25 bits a weight, int4 with 32 is 4.5; bench/results/cpu_quantized.md has the errors
# of other sizes.
FORMATS = {f.name: f for f in (Format("int8", 8, 64, "int8"), Format("int4", 4, 32, "uint8"))}
