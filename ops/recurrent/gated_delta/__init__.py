"""gated_delta: specification in op.py; a C++ kernel for CPUs and a Triton kernel."""

from graphllm.ops.recurrent.gated_delta import cpu, triton_gated_delta  # noqa: F401
from graphllm.ops.recurrent.gated_delta.op import gated_delta

__all__ = ["gated_delta"]
