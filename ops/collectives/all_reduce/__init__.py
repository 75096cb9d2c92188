"""all_reduce: specification in op.py, how a step runs it in files of their own. The first one that serves is taken."""

import importlib.util

from graphllm.ops.collectives.all_reduce.op import all_reduce

if importlib.util.find_spec("triton"):
    from graphllm.ops.collectives.all_reduce import triton_exchange  # noqa: F401
from graphllm.ops.collectives.all_reduce import extern  # noqa: F401

__all__ = ["all_reduce"]
