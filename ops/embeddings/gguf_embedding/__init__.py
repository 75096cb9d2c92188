"""gguf_embedding: specification in op.py, kernels in files of their own."""

from graphllm.ops.embeddings.gguf_embedding import cpu  # noqa: F401
from graphllm.ops.embeddings.gguf_embedding.op import gguf_embedding

__all__ = ["gguf_embedding"]
