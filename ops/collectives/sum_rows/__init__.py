"""sum_rows: specification in op.py, how a step runs it in extern.py."""

from graphllm.ops.collectives.sum_rows import extern  # noqa: F401
from graphllm.ops.collectives.sum_rows.op import sum_rows

__all__ = ["sum_rows"]
