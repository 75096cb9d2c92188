"""add_lora: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.lora.add_lora import cpu  # noqa: F401
from graphllm.ops.lora.add_lora.op import add_lora
from graphllm.ops.lora.add_lora.tuning import every_adapter

if importlib.util.find_spec("triton"):
    from graphllm.ops.lora.add_lora import triton_add_lora  # noqa: F401

add_lora.tuning_inputs(every_adapter)

__all__ = ["add_lora"]
