"""accept_drafts: specification in op.py; Inductor compiles it."""

from graphllm.ops.speculation.accept_drafts.op import accept_drafts

__all__ = ["accept_drafts"]
