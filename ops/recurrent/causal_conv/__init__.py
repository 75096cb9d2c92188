"""causal_conv: specification in op.py; a C++ kernel for CPUs and a Triton kernel."""

from graphllm.ops.recurrent.causal_conv import cpu, triton_causal_conv  # noqa: F401
from graphllm.ops.recurrent.causal_conv.op import causal_conv

__all__ = ["causal_conv"]
