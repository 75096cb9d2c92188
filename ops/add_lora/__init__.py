"""add_lora: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.add_lora import cpu  # noqa: F401
from graphllm.ops.add_lora.op import add_lora

if importlib.util.find_spec("triton"):
    from graphllm.ops.add_lora import triton_add_lora  # noqa: F401

__all__ = ["add_lora"]
