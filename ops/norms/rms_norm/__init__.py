"""rms_norm: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.norms.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
