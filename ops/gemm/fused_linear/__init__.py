"""fused_linear: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.gemm.fused_linear import cpu  # noqa: F401
from graphllm.ops.gemm.fused_linear.op import fused_linear
from graphllm.ops.lora.add_lora.tuning import every_adapter

if importlib.util.find_spec("triton"):
    from graphllm.ops.gemm.fused_linear import (  # noqa: F401
        gluon_few_rows,
        gluon_gated,
        gluon_int4_row,
        gluon_int4_tile,
        gluon_ordered,
        triton_fused_linear,
    )

fused_linear.tuning_inputs(every_adapter)

__all__ = ["fused_linear"]
