"""swiglu: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.activations.swiglu.op import swiglu

__all__ = ["swiglu"]
