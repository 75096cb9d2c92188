"""keep_path on the CPU: bytes of rows are copied, whatever they mean."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite
from graphllm.ops.speculation.keep_path.op import keep_path

_kernel = CKernel(
    "graphllm_keep_path",
    "(Tensor(a!) cache, Tensor table, Tensor starts, Tensor lengths, Tensor path, Tensor kept, SymInt S,"
    " SymInt heads, SymInt P, SymInt nodes, SymInt table_stride, SymInt block, SymInt head, SymInt row, SymInt scale)"
    " -> ()",
    Path(__file__).with_name("cpu.cpp"),
    usual=False,
)


def whole(site: CallSite) -> bool:
    """Whether the kernels can read the tensors of a site: a block is dense, blocks may lie apart."""
    cache, *tables = [t for t in site.args.values() if isinstance(t, Tensor)]
    dense = 1
    for size, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride()[1:]), strict=True):
        if stride != dense:
            return False
        dense *= size
    return all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in tables) and site.args["path_SD"].is_contiguous()


@keep_path.impl("cpu", device="cpu", supports=whole)
def cpu_keep_path(
    cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, path_SD: Tensor, kept_S: Tensor
) -> None:
    """One thread: what is moved is little."""
    (S, nodes), item = path_SD.shape, cache.element_size()
    *heads, P, width = cache.shape[1:]
    scale = 4 if cache.dtype == torch.int8 and heads else 0
    strides = (cache.stride(0) * item, P * width * item, (width - scale) * item, scale)
    _kernel(
        cache, block_table, query_start_loc, seq_lens, path_SD, kept_S, S, math.prod(heads), P, nodes,
        block_table.stride(0), *strides,
    )  # fmt: skip
