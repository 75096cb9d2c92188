"""store_kv on the kernel that paged_attention stores prompts with."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ir.op import each_alone
from graphllm.ops.attention.paged_attention.operands import Paged
from graphllm.ops.attention.paged_attention.triton_write import write_rows
from graphllm.ops.attention.store_kv.op import store_kv


def _supports(site: CallSite) -> bool:
    k, v, cache, *tables = [t for name, t in site.args.items() if name != "kv_scales"]
    newest = not site.target.arch[0] < "sm_89"
    return (
        k.dtype == v.dtype
        and (cache.dtype == k.dtype or (cache.dtype == torch.float8_e4m3fn and newest))
        and all(t.stride(-1) == 1 for t in (k, v, cache, *tables))
    )


@store_kv.impl("triton", device="cuda", supports=_supports, row_order=each_alone)
def triton_store_kv(k_TKE: Tensor, v_TKE: Tensor, paged: Paged, kv_scales: Tensor | None = None) -> None:
    """One launch."""
    write_rows(k_TKE, v_TKE, paged, kv_scales, None)
