"""linear_add_norm: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.gemm.linear_add_norm.op import linear_add_norm
from graphllm.ops.lora.add_lora.tuning import every_adapter

if importlib.util.find_spec("triton"):
    from graphllm.ops.gemm.linear_add_norm import triton_linear_add_norm  # noqa: F401

linear_add_norm.tuning_inputs(every_adapter)

__all__ = ["linear_add_norm"]
