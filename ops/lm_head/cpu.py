"""lm_head on the CPU: its rows are sequences, so the kernel of `linear` for few rows serves every bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir.op import CallSite
from graphllm.ops.linear.cpu import streaming_linear
from graphllm.ops.lm_head.op import lm_head


def _supports(site: CallSite) -> bool:
    tensors = (site.args["x_SD"], site.args["weight_VD"])
    return "avx2" in site.target.arch and all(t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in tensors)


@lm_head.impl("cpu_stream", device="cpu", supports=_supports)
def streaming_lm_head(x_SD: Tensor, weight_VD: Tensor, softcap: float = 0.0) -> Tensor:
    """bfloat16 products with float32 sums, reading the weights once for up to 64 rows."""
    logits_SV = streaming_linear(x_SD, weight_VD)
    return torch.tanh(logits_SV / softcap) * softcap if softcap > 0 else logits_SV
