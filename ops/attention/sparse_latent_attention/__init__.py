"""sparse_latent_attention: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.attention.sparse_latent_attention import cpu  # noqa: F401
from graphllm.ops.attention.sparse_latent_attention.op import sparse_latent_attention

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.sparse_latent_attention import gluon_chosen, triton_sparse  # noqa: F401

__all__ = ["sparse_latent_attention"]
