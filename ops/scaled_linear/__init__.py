"""scaled_linear: specification in op.py, the library's product beside it."""

from graphllm.ops.scaled_linear import library  # noqa: F401
from graphllm.ops.scaled_linear.op import scaled_linear

__all__ = ["scaled_linear"]
