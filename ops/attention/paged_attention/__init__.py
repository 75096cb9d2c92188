"""paged_attention: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.attention.paged_attention import cpu, tuning  # noqa: F401
from graphllm.ops.attention.paged_attention.op import kv_state, paged_attention

if importlib.util.find_spec("triton"):
    # Of prefill the first one that serves a site is taken where nothing is timed.
    from graphllm.ops.attention.paged_attention import (  # noqa: F401
        gluon_prefill,
        triton_decode,
        triton_prefill,
        triton_ranges,
        triton_verify,
    )

__all__ = ["kv_state", "paged_attention"]
