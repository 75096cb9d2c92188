"""keep_path: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.speculation.keep_path import cpu  # noqa: F401
from graphllm.ops.speculation.keep_path.op import keep_path

if importlib.util.find_spec("triton"):
    from graphllm.ops.speculation.keep_path import triton_keep_path  # noqa: F401

__all__ = ["keep_path"]
