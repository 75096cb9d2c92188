"""geglu: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.activations.geglu.op import geglu

__all__ = ["geglu"]
