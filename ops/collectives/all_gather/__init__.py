"""all_gather: specification in op.py, how a step runs it in extern.py."""

from graphllm.ops.collectives.all_gather import extern  # noqa: F401
from graphllm.ops.collectives.all_gather.op import all_gather

__all__ = ["all_gather"]
