"""encoder_attention: specification in op.py; the kernel for CPUs shares its headers with paged_attention."""

import importlib.util

from graphllm.ops.attention.encoder_attention import cpu  # noqa: F401
from graphllm.ops.attention.encoder_attention.op import encoder_attention

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.encoder_attention import triton_encoder  # noqa: F401

__all__ = ["encoder_attention"]
