"""token_logprobs: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.sampling.token_logprobs import cpu  # noqa: F401
from graphllm.ops.sampling.token_logprobs.op import token_logprobs

if importlib.util.find_spec("triton"):
    from graphllm.ops.sampling.token_logprobs import triton_token_logprobs  # noqa: F401

__all__ = ["token_logprobs"]
