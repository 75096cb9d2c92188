"""accept_tree: specification in op.py; Inductor compiles it, with what is done with the kept tokens."""

from graphllm.ops.speculation.accept_tree.op import accept_tree

__all__ = ["accept_tree"]
