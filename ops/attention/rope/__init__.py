"""rope: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.attention.rope.op import rope

__all__ = ["rope"]
