"""place_experts: specification in op.py; Inductor compiles it."""

from graphllm.ops.moe.place_experts.op import place_experts

__all__ = ["place_experts"]
