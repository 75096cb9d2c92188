"""keep_path: the cache rows of the drafts that are kept move up to where their tokens stand."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, op
from graphllm.ops.attention.paged_attention.op import entries_of


def _cost(kv_cache: Tensor, path_SD: Tensor, kept_S: Tensor) -> Cost:
    path, kept = path_SD.tolist(), kept_S.tolist()
    moved = sum(row[d] != d for row, n in zip(path, kept, strict=True) for d in range(1, n))
    entry = 2 * kv_cache.shape[2] * kv_cache.shape[4] * kv_cache.element_size()
    return Cost(4 * (path_SD.numel() + kept_S.numel()) + 2 * moved * entry, 0)


@op(boundary=True, cost=_cost, mutates=("kv_cache",))
def keep_path(
    kv_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, path_SD: Tensor, kept_S: Tensor
) -> None:
    """Of each sequence's rows that `paged_attention` has written in this step, move the rows of a path to the front.

    kv_cache, block_table, query_start_loc and seq_lens: as there. path_SD [S, D + 1] int32: the rows, growing, the
    first is 0; kept_S [S] int32: how many of them are kept. For d from 1 to kept - 1, keys and values of row path[d],
    with their scales, are copied to the place of row d. They are copied in this order, and path[d] is at least d, so
    nothing is read that was overwritten.
    """
    E = kv_cache.shape[4] - (4 if kv_cache.dtype == torch.int8 else 0)
    parts = [t for t in entries_of(kv_cache, E) if t is not None]
    P = kv_cache.shape[3]
    counts = query_start_loc[1:] - query_start_loc[:-1]
    given = (block_table.tolist(), (seq_lens - counts).tolist(), path_SD.tolist(), kept_S.tolist(), counts.tolist())
    for table, start, path, kept, count in zip(*given, strict=True):
        for d in range(1, kept):
            if count and path[d] != d:
                source, target = start + path[d], start + d
                for part in parts:
                    part[table[target // P], :, :, target % P] = part[table[source // P], :, :, source % P]


@keep_path.fake
def _() -> None:
    return None
