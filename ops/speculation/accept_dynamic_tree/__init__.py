"""accept_dynamic_tree: specification in op.py; Inductor compiles it."""

from graphllm.ops.speculation.accept_dynamic_tree.op import accept_dynamic_tree

__all__ = ["accept_dynamic_tree"]
