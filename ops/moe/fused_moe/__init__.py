"""fused_moe: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.moe.fused_moe import cpu  # noqa: F401
from graphllm.ops.moe.fused_moe.op import fused_moe

if importlib.util.find_spec("triton"):
    from graphllm.ops.moe.fused_moe import (  # noqa: F401
        gluon_one_token,
        gluon_sorted,
        gluon_tokens,
        triton_few_tokens,
        triton_many_tokens,
    )

__all__ = ["fused_moe"]
