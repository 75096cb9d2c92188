"""Inputs for index_topk: ragged batches at small sizes, and the shapes of DeepSeek-V3.2.

Numbers are small integers, so that scores are exact in every dtype, and many are equal.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.attention.ragged_cases import Sequences, owned_rows, ragged_batch

_EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}


def _case(
    name: str,
    sequences: Sequences,
    heads: tuple[int, int] = (4, 32),
    topk: int = 8,
    *,
    block_size: int = 16,
    fused: bool = False,
    pad: int = 0,
    queries: int = 1,
    drawn: bool = False,
    size: Literal["small", "real"] = "small",
) -> Case:
    """One case.

    sequences: query tokens of each, and its length including them.
    heads: H and E.
    fused: rows are slices of wider ones.
    pad: rows after the last sequence's.
    queries: of a sequence in the bucket, if it has several and there are no prompts.
    drawn: numbers are normal ones, which few positions share; for timing.
    """
    H, E = heads
    T, S = sum(n for n, _ in sequences) + pad, len(sequences)
    kind = "decode" if all(n <= queries for n, _ in sequences) else "mixed"
    rows = T if queries == 1 else S

    def numbers(make: Maker, *shape: int) -> torch.Tensor:
        return make.normal(*shape) if drawn else make.integers(-2, 3, *shape, dtype=make.dtype)

    def inputs(make: Maker) -> dict[str, object]:
        q, k = numbers(make, T, H, E), numbers(make, T, E)
        if fused:
            merged = torch.cat([q.flatten(1), k], 1)
            q, k = merged[:, : H * E].unflatten(1, (H, E)), merged[:, H * E :]
        total, where = ragged_batch(make, sequences, block_size)
        weights = make.integers(-1, 5, T, H, dtype=torch.float32)
        cache = numbers(make, total, block_size, E)
        return {"index_q_THE": q, "index_k_TE": k, "index_weights_TH": weights, "index_cache": cache, **where,
                "topk": topk}  # fmt: skip

    bucket = Bucket(kind, rows, rows, queries)  # type: ignore[arg-type]
    return Case(name, inputs, _EXACT, "scores are exact, and the result is integers", bucket, size, owned_rows)


_V32 = (64, 128)
_BIG: dict[str, Any] = {"block_size": 64, "size": "real", "drawn": True}

CASES = (
    _case("decode_one", [(1, 37)]),
    _case("decode_first_token", [(1, 1)]),
    _case("decode_ragged", [(1, 1), (1, 7), (1, 8), (1, 9), (1, 100), (1, 333)], fused=True),
    _case("decode_empty", [(1, 65), (0, 0), (1, 5), (0, 0)], pad=2),
    _case("decode_nothing", [(0, 0)]),
    _case("decode_long", [(1, 1500), (1, 40), (1, 700)], topk=64),
    _case("decode_odd", [(1, 50), (1, 129)], (3, 24), 5),
    _case("decode_20_heads", [(1, 90), (1, 64)], (20, 32), 16, block_size=64),
    _case("decode_all", [(1, 90), (1, 64)], topk=128),
    _case("verify", [(4, 4), (1, 16), (3, 17), (0, 0), (2, 333)], queries=4, pad=5),
    _case("prompt", [(40, 40)], fused=True),
    _case("chunked", [(9, 60), (5, 130), (33, 150)], topk=16),
    _case("mixed", [(1, 77), (1, 16), (1, 1), (19, 19), (0, 0), (6, 100)], fused=True, pad=7),
    _case("mixed_wide", [(1, 77), (35, 333), (5, 40)], (64, 128), 32),
    _case("decode_v32_b8_ctx32768", [(1, 32768)] * 8, _V32, 2048, **_BIG),
    _case("decode_v32_b32_ctx32768", [(1, 32768)] * 32, _V32, 2048, **_BIG),
    _case("prefill_v32_chunk2048_ctx16384", [(2048, 16384)], _V32, 2048, **_BIG),
)
