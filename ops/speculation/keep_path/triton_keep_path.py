"""Triton kernel for keep_path: a program for each sequence and head, which copies one row after the other."""

# mypy: allow-untyped-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.speculation.keep_path.cpu import whole
from graphllm.ops.speculation.keep_path.op import keep_path


@triton.jit
def _keep_kernel(
    cache_ptr, table_ptr, query_start_ptr, seq_len_ptr, path_ptr, kept_ptr,
    CACHE_BLOCK: tl.constexpr, CACHE_HEAD: tl.constexpr, TABLE_ROW: tl.constexpr, NODES: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(query_start_ptr + s)
    count = tl.load(query_start_ptr + s + 1) - row
    start = tl.load(seq_len_ptr + s) - count
    kept = tl.where(count > 0, tl.load(kept_ptr + s), 0)
    table_row = table_ptr + s.to(tl.int64) * TABLE_ROW
    head_ptr = cache_ptr + head * CACHE_HEAD
    e = tl.arange(0, E_PAD)
    for d in range(1, kept):
        node = tl.load(path_ptr + s * NODES + d)
        if node != d:
            source, target = start + node, start + d
            source_block = tl.load(table_row + source // P).to(tl.int64)
            target_block = tl.load(table_row + target // P).to(tl.int64)
            entry = tl.load(head_ptr + source_block * CACHE_BLOCK + (source % P) * E + e, mask=e < E)
            tl.debug_barrier()  # the next row may be written where another thread still reads
            tl.store(head_ptr + target_block * CACHE_BLOCK + (target % P) * E + e, entry, mask=e < E)


def _supports(site: CallSite) -> bool:
    cache = site.args["cache"]
    return whole(site) and not (cache.dtype == torch.int8 and cache.dim() == 5)


@keep_path.impl("triton_keep_path", device="cuda", supports=_supports)
def triton_keep_path(
    cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, path_SD: Tensor, kept_S: Tensor
) -> None:
    """One launch."""
    *heads, P, E = cache.shape[1:]
    launch_triton(
        _keep_kernel, (math.prod(heads), path_SD.shape[0]),
        cache, block_table, query_start_loc, seq_lens, path_SD, kept_S,
        CACHE_BLOCK=cache.stride(0), CACHE_HEAD=P * E, TABLE_ROW=block_table.stride(0),
        NODES=path_SD.shape[1], E=E, E_PAD=max(16, 1 << (E - 1).bit_length()), P=P, num_warps=1,
    )  # fmt: skip
