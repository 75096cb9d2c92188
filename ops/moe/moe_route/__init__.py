"""moe_route: specification in op.py, which Inductor compiles on a CPU; a kernel for GPUs in a file of its own."""

import importlib.util

from graphllm.ops.moe.moe_route.op import moe_route

if importlib.util.find_spec("triton"):
    from graphllm.ops.moe.moe_route import triton_moe_route  # noqa: F401

__all__ = ["moe_route"]
