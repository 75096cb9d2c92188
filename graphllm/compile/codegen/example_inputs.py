"""Inputs to run pieces and kernels on, of given specs. Imports nothing of Inductor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphllm.ir.graph import TensorSpec
from graphllm.program.expr import value


def example(spec: TensorSpec, sizes: Mapping[str, int], device: str = "cuda") -> torch.Tensor:
    """An input to run on: random numbers, and zeros for integers, which are ids and offsets. On "meta": no data."""
    shape, stride = ([value(d, sizes) for d in dims] for dims in (spec.shape, spec.stride))
    made = torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=device)
    if not made.is_floating_point():
        return made.zero_()
    if made.itemsize == 1:  # torch draws no numbers of 8 bits
        return made.copy_(torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.05))
    return made.normal_(0.0, 0.05)
