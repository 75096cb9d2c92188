"""Programmatic dependent launch in Triton kernels: a kernel starts while the kernel before it still runs."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gdc_wait_early(EMULATED: tl.constexpr):
    """Let the next kernel start, then wait for the kernel before: all that a kernel reads comes after. Triton's
    interpreter (EMULATED) has neither. A kernel's source must have "gdc_wait" in it, see `starts_early`."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
