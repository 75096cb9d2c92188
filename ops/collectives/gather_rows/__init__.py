"""gather_rows: specification in op.py, how a step runs it in extern.py."""

from graphllm.ops.collectives.gather_rows import extern  # noqa: F401
from graphllm.ops.collectives.gather_rows.op import gather_rows

__all__ = ["gather_rows"]
