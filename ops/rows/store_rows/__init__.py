"""store_rows: specification in op.py; Inductor compiles it, with what makes the rows."""

from graphllm.ops.rows.store_rows.op import store_rows

__all__ = ["store_rows"]
