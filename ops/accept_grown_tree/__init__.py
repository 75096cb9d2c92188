"""accept_grown_tree: specification in op.py; Inductor compiles it."""

from graphllm.ops.accept_grown_tree.op import accept_grown_tree

__all__ = ["accept_grown_tree"]
