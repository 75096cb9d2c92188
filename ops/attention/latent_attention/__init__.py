"""latent_attention: specification in op.py, kernels in files of their own."""

from graphllm.ops.attention.latent_attention import cpu  # noqa: F401
from graphllm.ops.attention.latent_attention.op import latent_attention, latent_state
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections

__all__ = ["LatentRows", "PagedLatents", "UpProjections", "latent_attention", "latent_state"]
