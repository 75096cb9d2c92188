"""record_tokens: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.sampling.record_tokens import cpu  # noqa: F401
from graphllm.ops.sampling.record_tokens.op import record_tokens

if importlib.util.find_spec("triton"):
    from graphllm.ops.sampling.record_tokens import triton_record_tokens  # noqa: F401

__all__ = ["record_tokens"]
