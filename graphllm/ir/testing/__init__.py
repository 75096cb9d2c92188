"""What every op is tested and timed with: cases, checks against its specification, timing of its kernels."""

from graphllm.ir.testing.cases import Case, Maker, moved_rows

__all__ = ["Case", "Maker", "moved_rows"]
