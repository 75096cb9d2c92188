"""A step to tune attention on: decode only or prompts as well, contexts of many lengths in scattered blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.attention.paged_attention.op import paged_attention

_CONTEXT = (
    512  # the longest context of a decoding sequence: short ones tell plans apart, long ones are bound by reading
)
_TOKENS = 1 << 17  # twice the tokens in all contexts of a large batch


def tuning_batch(block_table: Tensor, T: int, P: int) -> tuple[int, dict[str, Tensor]]:
    """How many blocks of P tokens a cache has, and where sequences are in it, on the device of the table and of its
    shape: each sequence has one token, and what is left of T are prompts of the last ones."""
    (S, columns), device = block_table.shape, block_table.device
    most = min(columns * P, _CONTEXT, max(P, _TOKENS // S))
    queries = [1] * min(S, T) + [0] * max(0, S - T)
    lengths = [max(n, most * (s + 1) // S) for s, n in enumerate(queries)]
    left = T - sum(queries)
    for s in reversed(range(S)):
        if left > 0:
            more = min(left, columns * P - 1)
            queries[s] = lengths[s] = 1 + more
            left -= more
    blocks = [-(-length // P) for length in lengths]
    order = torch.randperm(sum(blocks), dtype=torch.int64).to(torch.int32)
    table = torch.zeros((S, columns), dtype=torch.int32)
    for s, used in enumerate(order.split(blocks)):
        table[s, : len(used)] = used
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return len(order), {
        "block_table": table.to(device),
        "query_start_loc": starts.to(device),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
    }


@paged_attention.tuning_inputs
def tuning_step(q_THE: Tensor, kv_cache: Tensor, block_table: Tensor) -> dict[str, Tensor]:
    """The cache, with other blocks than the given one, and what says where sequences are in it."""
    blocks, where = tuning_batch(block_table, q_THE.shape[0], kv_cache.shape[3])
    drawn = torch.randn((blocks, *kv_cache.shape[1:]), dtype=q_THE.dtype, device=q_THE.device)
    return {"kv_cache": drawn.to(kv_cache.dtype), **where}
