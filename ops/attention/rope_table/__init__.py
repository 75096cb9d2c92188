"""rope_table: specification in op.py, frequencies of a checkpoint's config in frequencies.py; Inductor fuses the op."""

from graphllm.ops.attention.rope_table.frequencies import Rope
from graphllm.ops.attention.rope_table.op import rope_table

__all__ = ["Rope", "rope_table"]
