"""moe_route: specification in op.py; Inductor compiles the reference."""

from graphllm.ops.moe_route.op import moe_route

__all__ = ["moe_route"]
