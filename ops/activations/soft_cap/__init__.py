"""soft_cap: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.activations.soft_cap.op import soft_cap

__all__ = ["soft_cap"]
