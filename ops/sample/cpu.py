"""sample on the CPU: see cpu.cpp. Exactly the tokens of the reference, up to rounding at a top-p boundary."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import Site
from graphllm.ops.sample.op import sample

_SCHEMA = (
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor draw,"
    " Tensor(a!) out, SymInt S, SymInt V, SymInt stride) -> ()"
)
_SOURCE = Path(__file__).with_name("cpu.cpp")
_kernels = {
    torch.float32: CKernel("graphllm_sample_f32", _SCHEMA, _SOURCE),
    torch.bfloat16: CKernel("graphllm_sample_bf16", _SCHEMA, _SOURCE),
}


def _supports(site: Site) -> bool:
    logits, *rest = site.args.values()
    return logits.dtype in _kernels and logits.stride(-1) == 1 and all(t.is_contiguous() for t in rest)


@sample.impl("cpu_select", device="cpu", supports=_supports)
def selecting_sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    draw_S: Tensor,
) -> Tensor:
    """Thresholds by histogram selection, one row a thread."""
    S, V = logits_SV.shape
    out_S = torch.empty(S, dtype=torch.int32, device=logits_SV.device)
    _kernels[logits_SV.dtype](
        logits_SV, temperature_S, top_k_S, top_p_S, min_p_S, seed_S, draw_S, out_S, S, V, logits_SV.stride(0)
    )
    return out_S
