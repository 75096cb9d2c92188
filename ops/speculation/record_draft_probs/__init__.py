"""record_draft_probs: specification in op.py."""

from graphllm.ops.speculation.record_draft_probs.op import record_draft_probs

__all__ = ["record_draft_probs"]
