"""The logarithm that makes step sizes positive, for Triton kernels of scans."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(v):
    """log(1 + exp(v)). Where exp(-|v|) is lost in 1 + exp(-|v|), it is the logarithm itself."""
    e = tl.exp(-tl.abs(v))
    return tl.maximum(v, 0.0) + tl.where(e < 1e-4, e - 0.5 * e * e, tl.log(1.0 + e))
