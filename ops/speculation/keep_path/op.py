"""keep_path: the cache rows of the drafts that are kept move up to where their tokens stand."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, op
from graphllm.ops.attention.paged_attention.op import entries_of


def rows_of(cache: Tensor) -> list[Tensor]:
    """Views [B, kinds, K, P, ..] of the parts of a cache that belong to tokens."""
    if cache.dim() == 3:
        return [cache[:, None, None]]
    E = cache.shape[4] - (4 if cache.dtype == torch.int8 else 0)
    return [t for t in entries_of(cache, E) if t is not None]


def _cost(cache: Tensor, path_SD: Tensor, kept_S: Tensor) -> Cost:
    path, kept = path_SD.tolist(), kept_S.tolist()
    moved = sum(row[d] != d for row, n in zip(path, kept, strict=True) for d in range(1, n))
    entry = cache[0].numel() // cache.shape[-2] * cache.element_size()
    return Cost(4 * (path_SD.numel() + kept_S.numel()) + 2 * moved * entry, 0)


@op(boundary=True, cost=_cost, mutates=("cache",))
def keep_path(
    cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, path_SD: Tensor, kept_S: Tensor
) -> None:
    """Of each sequence's rows that attention has written in this step, move the rows of a path to the front.

    cache: keys and values [B, 2, K, P, E] as of `paged_attention`, or latents [B, P, C] as of `latent_attention`.
    block_table, query_start_loc and seq_lens: as there.
    path_SD: the rows, growing, the first is 0; [S, D + 1] int32.
    kept_S: how many of them are kept; [S] int32.

    For d from 1 to kept - 1, all that the cache has of row path[d], scales too, is copied to the place of row d. Rows
    are copied in this order, and path[d] is at least d, so nothing is read that was overwritten.
    """
    parts, P = rows_of(cache), cache.shape[-2]
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
