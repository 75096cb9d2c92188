"""all_reduce: specification in op.py, how a step runs it beside it."""

from graphllm.ops.all_reduce import extern  # noqa: F401
from graphllm.ops.all_reduce.op import all_reduce

__all__ = ["all_reduce"]
