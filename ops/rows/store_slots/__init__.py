"""store_slots: specification in op.py; Inductor compiles it, with what makes the rows."""

from graphllm.ops.rows.store_slots.op import store_slots

__all__ = ["store_slots"]
