"""save_snapshots: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.recurrent.save_snapshots import cpu  # noqa: F401
from graphllm.ops.recurrent.save_snapshots.op import save_snapshots

if importlib.util.find_spec("triton"):
    from graphllm.ops.recurrent.save_snapshots import triton_save_snapshots  # noqa: F401

__all__ = ["save_snapshots"]
