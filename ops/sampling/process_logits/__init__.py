"""process_logits: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.sampling.process_logits import cpu  # noqa: F401
from graphllm.ops.sampling.process_logits.op import process_logits

if importlib.util.find_spec("triton"):
    from graphllm.ops.sampling.process_logits import triton_process_logits  # noqa: F401

__all__ = ["process_logits"]
