"""load_snapshots: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.recurrent.load_snapshots import cpu  # noqa: F401
from graphllm.ops.recurrent.load_snapshots.op import load_snapshots

if importlib.util.find_spec("triton"):
    from graphllm.ops.recurrent.load_snapshots import triton_load_snapshots  # noqa: F401

__all__ = ["load_snapshots"]
