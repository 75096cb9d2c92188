"""What attention does not see of the cache may be anything: blocks after a sequence, the rest of its last block, and
blocks before a window, which others may have by now."""

from __future__ import annotations

import pytest
import torch

from graphllm.ops.attention.paged_attention import paged_attention

P, K, H, E, WINDOW = 16, 1, 2, 32, 20
NAN = float("nan")


def _batch(queries: list[int], lengths: list[int]) -> tuple[dict[str, object], torch.Tensor]:
    """Sequences that have given back their blocks before the window, and what is to come out, from plain keys and
    values."""
    torch.manual_seed(1)
    T, per = sum(queries), -(-max(lengths) // P)
    cache = torch.full((1 + len(queries) * per, 2, K, P, E), NAN)
    table = torch.zeros(len(queries), per + 1, dtype=torch.int32)
    q, k, v = (torch.randn(T, h, E) for h in (H, K, K))
    expected, at = torch.zeros(T, H, E), 0
    for s, (n, length) in enumerate(zip(queries, lengths, strict=True)):
        keys, values = torch.randn(2, length, K, E).unbind()
        keys[length - n :], values[length - n :] = k[at : at + n], v[at : at + n]
        first = max(0, length - n - WINDOW + 1) // P * P
        for p in range(first, length):
            table[s, p // P] = 1 + s * per + p // P
            if p < length - n:
                cache[table[s, p // P], :, :, p % P] = torch.stack([keys[p], values[p]])
        for i in range(n):
            p = length - n + i
            seen = slice(max(0, p - WINDOW + 1), p + 1)
            weights = torch.softmax(torch.einsum("he,le->hl", q[at + i], keys[seen, 0]) * E**-0.5, -1)
            expected[at + i] = weights @ values[seen, 0]
        at += n
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    arguments = {
        "q_THE": q, "k_TKE": k, "v_TKE": v, "kv_cache": cache, "block_table": table, "query_start_loc": starts,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32), "scale": E**-0.5, "window": WINDOW,
    }  # fmt: skip
    return arguments, expected


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16)])
def test_prompts_by_triton(block_m: int, block_n: int) -> None:
    arguments, expected = _batch([9, 5, 24, 9], [61, 5, 40, 49])
    found = paged_attention.impls["triton_prefill"].fn(
        **paged_attention.bind((), arguments), block_m=block_m, block_n=block_n, warps=4, stages=2
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_prompts_by_the_reference() -> None:
    arguments, expected = _batch([9, 5, 24, 9], [61, 5, 40, 49])
    torch.testing.assert_close(paged_attention(**arguments), expected, rtol=1e-4, atol=1e-4)
