"""index_topk on GPUs: scores of all keys go to a scratch of bounded size, then each row's best are selected there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.index_topk.op import index_topk
from graphllm.ops.attention.index_topk.operands import IndexRows, PagedKeys
from graphllm.ops.attention.index_topk.triton_scores import scratch, write_keys, write_scores
from graphllm.ops.attention.index_topk.triton_select import choose
from graphllm.ops.attention.paged_attention.triton_common import power_of_2

_MOST_SCORES = 1 << 27  # of the scratch, 4 bytes each
_MOST_TOKENS = 1 << 21  # that selecting counts


def _problem(site: CallSite) -> str:
    """Why the kernels do not serve a site, and what a user can do; empty where they do."""
    (q, k, weights), (cache, *_) = site.struct(IndexRows), site.struct(PagedKeys)
    P = cache.shape[1]
    if P % 16 or P & (P - 1):
        return f"block_size {P}: no kernel of index_topk for a GPU takes it; use a power of two from 16"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or {k.dtype, cache.dtype} != {q.dtype}:
        return f"keys of {k.dtype} for queries of {q.dtype}: kernels of index_topk take one dtype of the usual three"
    if site.args["block_table"].shape[1] * P >= _MOST_TOKENS:
        return f"a context of {_MOST_TOKENS} tokens: kernels of index_topk take fewer; lower max_model_len"
    if weights.dtype != torch.float32:
        return f"weights of {weights.dtype}: kernels of index_topk take float32"
    return ""


def _configs(site: CallSite) -> list[Mapping[str, Any]]:
    """The plan for a bucket: a row a program where there are few, else several that share tiles of keys."""
    q, table = site.args["index_q_THE"], site.args["block_table"]
    width = max(1, table.shape[1]) * site.args["index_cache"].shape[1]
    rows, wide = max(1, site.rows("index_q_THE")), q.dtype == torch.float32
    few = site.bucket.kind == "decode"
    block_q = 1 if few else 32
    chunk = max(block_q, _MOST_SCORES // width // block_q * block_q)
    block_n = 32 if wide else 128 if few else 256
    held = min(power_of_2(width, 128), 32768 if few else 16384)
    return [
        {
            "chunk": min(chunk, -(-rows // block_q) * block_q), "chunks": -(-rows // chunk),
            "scores": {
                "block_q": block_q, "block_n": block_n, "shares": 1 if few else min(32, -(-width // block_n)),
                "programs": 2 * site.target.multiprocessors, "warps": 4 if few or wide else 8, "stages": 3,
            },
            "select": {
                "held": held, "block": min(4096 if few else 2048, held),
                "warps": max(1, min(16 if few else 8, held // 1024)),
            },
        }
    ]  # fmt: skip


@index_topk.impl(
    "triton_index", device="cuda", supports=lambda site: not _problem(site), configs=_configs, remedy=_problem
)
def triton_index(
    rows: IndexRows, paged: PagedKeys, topk: int, *, chunk: int, chunks: int, scores: Mapping[str, int],
    select: Mapping[str, int],
) -> Tensor:  # fmt: skip
    """Scores and selection of ``chunk`` rows at a time, as often as the bucket's most rows need."""
    q = rows.index_q_THE
    T, block_q = q.shape[0], scores["block_q"]
    chosen_TK = q.new_empty((T, topk), dtype=torch.int32)
    write_keys(rows, paged)
    count = T if chunks == 1 else chunk
    order = scratch(count, paged.block_table.shape[1] * paged.index_cache.shape[1], q)
    for first in range(0, chunk * chunks, chunk):
        write_scores(rows, paged, order, first, (count + block_q - 1) // block_q, **scores)
        choose(order, chosen_TK, paged, first, count, **select)
    return chosen_TK
