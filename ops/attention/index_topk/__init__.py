"""index_topk: specification in op.py, kernels in files of their own."""

from graphllm.ops.attention.index_topk.op import index_state, index_topk
from graphllm.ops.attention.index_topk.operands import IndexRows, PagedKeys

__all__ = ["IndexRows", "PagedKeys", "index_state", "index_topk"]
