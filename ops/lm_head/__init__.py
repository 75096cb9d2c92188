"""lm_head: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.lm_head.op import lm_head

__all__ = ["lm_head"]
