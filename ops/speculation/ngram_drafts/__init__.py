"""ngram_drafts: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.speculation.ngram_drafts import cpu  # noqa: F401
from graphllm.ops.speculation.ngram_drafts.op import ngram_drafts

if importlib.util.find_spec("triton"):
    from graphllm.ops.speculation.ngram_drafts import triton_ngram_drafts  # noqa: F401

__all__ = ["ngram_drafts"]
