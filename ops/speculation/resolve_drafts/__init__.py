"""resolve_drafts: specification in op.py; Inductor compiles it."""

from graphllm.ops.speculation.resolve_drafts.op import resolve_drafts

__all__ = ["resolve_drafts"]
