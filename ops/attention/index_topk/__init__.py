"""index_topk: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.attention.index_topk import cpu  # noqa: F401
from graphllm.ops.attention.index_topk.op import index_state, index_topk
from graphllm.ops.attention.index_topk.operands import IndexRows, PagedKeys

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.index_topk import triton_index  # noqa: F401

__all__ = ["IndexRows", "PagedKeys", "index_state", "index_topk"]
