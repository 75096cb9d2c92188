"""keep_path on the CPU: bytes of rows are copied, whatever they mean."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite
from graphllm.ops.speculation.keep_path.op import keep_path

_kernel = CKernel(
    "graphllm_keep_path",
    "(Tensor(a!) kv_cache, Tensor table, Tensor starts, Tensor lengths, Tensor path, Tensor kept, SymInt S,"
    " SymInt heads, SymInt P, SymInt nodes, SymInt table_stride, SymInt block, SymInt head, SymInt row, SymInt scale)"
    " -> ()",
    Path(__file__).with_name("cpu.cpp"),
    usual=False,
)


def whole(site: CallSite) -> bool:
    """Whether the kernels can read the tensors of a site."""
    cache, *tables = [t for t in site.args.values() if isinstance(t, Tensor)]
    heads_lie_dense = cache.stride(1) == cache.shape[2] * cache.stride(2)
    return (
        heads_lie_dense
        and cache.stride(2) == cache.shape[3] * cache.shape[4]
        and all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in tables)
        and site.args["path_SD"].is_contiguous()
    )


@keep_path.impl("cpu", device="cpu", supports=whole)
def cpu_keep_path(
    kv_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, path_SD: Tensor, kept_S: Tensor
) -> None:
    """One thread: what is moved is little."""
    (S, nodes), item = path_SD.shape, kv_cache.element_size()
    _, kinds, heads, P, width = kv_cache.shape
    scale = 4 if kv_cache.dtype == torch.int8 else 0
    strides = (kv_cache.stride(0) * item, kv_cache.stride(2) * item, (width - scale) * item, scale)
    _kernel(
        kv_cache, block_table, query_start_loc, seq_lens, path_SD, kept_S, S, kinds * heads, P, nodes,
        block_table.stride(0), *strides,
    )  # fmt: skip
