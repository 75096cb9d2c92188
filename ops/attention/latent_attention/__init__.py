"""latent_attention: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.attention.latent_attention import cpu, tuning  # noqa: F401
from graphllm.ops.attention.latent_attention.op import latent_attention, latent_state
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.latent_attention import (  # noqa: F401
        gluon_decode,
        gluon_prefill,
        triton_decode,
        triton_prefill,
    )

__all__ = ["LatentRows", "PagedLatents", "UpProjections", "latent_attention", "latent_state"]
