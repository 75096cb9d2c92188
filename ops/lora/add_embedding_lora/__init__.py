"""add_embedding_lora: specification in op.py, a kernel in a file of its own."""

import importlib.util

from graphllm.ops.lora.add_embedding_lora.op import add_embedding_lora

if importlib.util.find_spec("triton"):
    from graphllm.ops.lora.add_embedding_lora import triton_add_embedding_lora  # noqa: F401

__all__ = ["add_embedding_lora"]
