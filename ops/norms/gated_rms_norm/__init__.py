"""gated_rms_norm: specification in op.py, a kernel in a file of its own."""

import importlib.util

from graphllm.ops.norms.gated_rms_norm.op import gated_rms_norm

if importlib.util.find_spec("triton"):
    from graphllm.ops.norms.gated_rms_norm import triton_gated_rms_norm  # noqa: F401

__all__ = ["gated_rms_norm"]
