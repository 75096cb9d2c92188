"""record_drafts: specification in op.py; Inductor compiles it."""

from graphllm.ops.speculation.record_drafts.op import record_drafts

__all__ = ["record_drafts"]
