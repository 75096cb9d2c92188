"""layer_norm: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.norms.layer_norm.op import layer_norm

__all__ = ["layer_norm"]
