"""all_reduce: specification in op.py; it runs between the pieces of a step, by torch.distributed."""

from graphllm.ops.all_reduce.op import all_reduce

__all__ = ["all_reduce"]
