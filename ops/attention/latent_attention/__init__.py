"""latent_attention: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.attention.latent_attention import cpu, tuning  # noqa: F401
from graphllm.ops.attention.latent_attention.op import latent_attention, latent_state
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.latent_attention import gluon_prefill, triton_prefill  # noqa: F401
    from graphllm.ops.attention.latent_attention.decode import gluon_decode, triton_decode  # noqa: F401

__all__ = ["LatentRows", "PagedLatents", "UpProjections", "latent_attention", "latent_state"]
