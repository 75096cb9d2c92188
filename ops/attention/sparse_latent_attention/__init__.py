"""sparse_latent_attention: specification in op.py, kernels in files of their own."""

from graphllm.ops.attention.sparse_latent_attention.op import sparse_latent_attention

__all__ = ["sparse_latent_attention"]
