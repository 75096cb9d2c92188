"""linear_add_norm: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.add_lora.tuning import every_adapter
from graphllm.ops.linear_add_norm.op import linear_add_norm

if importlib.util.find_spec("triton"):
    from graphllm.ops.linear_add_norm import triton_linear_add_norm  # noqa: F401

linear_add_norm.tuning_inputs(every_adapter)

__all__ = ["linear_add_norm"]
