"""adjust_logits: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.adjust_logits import cpu  # noqa: F401
from graphllm.ops.adjust_logits.op import adjust_logits

if importlib.util.find_spec("triton"):
    from graphllm.ops.adjust_logits import triton_adjust_logits  # noqa: F401

__all__ = ["adjust_logits"]
