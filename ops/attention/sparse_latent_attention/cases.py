"""Inputs for sparse_latent_attention: ragged batches at small sizes, and the shapes of DeepSeek-V3.2."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.attention.latent_attention.cases import drawn_cache, numbers
from graphllm.ops.attention.ragged_cases import Sequences, owned_rows, ragged_batch

_TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}
_REASON = (
    "float32 accumulation in tiles; in half precision queries and results in latent space, weights of the softmax and "
    "the result are rounded to the dtype once each"
)
_SMALL = (4, 32, 16, 64, 32)  # H, N, R, L, V


def _chosen(make: Maker, sequences: Sequences, topk: int, most: int) -> torch.Tensor:
    """Of each token some positions up to its own in ascending order, then -1. Of ``most`` rows, none in those after the
    last token's."""
    rows = torch.full((most, topk), -1, dtype=torch.int32)
    t = 0
    for n, length in sequences:
        for position in range(length - n, length):
            shuffled = torch.randperm(position + 1, generator=make.generator, device=make.generator.device).cpu()
            chosen = shuffled[:topk].sort().values.to(torch.int32)
            rows[t, : len(chosen)] = chosen
            t += 1
    return rows.to(make.device)


def _case(
    name: str,
    sequences: Sequences,
    heads: tuple[int, int, int, int, int] = _SMALL,
    topk: int = 8,
    *,
    block_size: int = 16,
    fused: bool = False,
    pad: int = 0,
    more: int = 0,
    queries: int = 1,
    size: Literal["small", "real"] = "small",
    cache: str = "",
) -> Case:
    """One case.

    sequences: query tokens of each, and its length including them.
    heads: H, N, R, L, V.
    fused: rows are slices of wider ones.
    pad: rows after the last sequence's.
    more: rows of what is chosen after all of these.
    queries: of a sequence in the bucket, if it has several and there are no prompts.
    cache: its dtype, if not that of the rest.
    """
    H, N, R, L, V = heads
    T, S = sum(n for n, _ in sequences) + pad, len(sequences)
    kind = "decode" if all(n <= queries for n, _ in sequences) else "mixed"
    rows = T if queries == 1 else S

    def inputs(make: Maker) -> dict[str, object]:
        if fused:
            q, latents, k_rope = make.normal(T, H * (N + R) + L + R).split((H * (N + R), L, R), 1)
            q_nope, q_rope = q.unflatten(1, (H, N + R)).split((N, R), 2)
        else:
            q_nope, q_rope, latents, k_rope = (make.normal(T, *of) for of in ((H, N), (H, R), (L,), (R,)))
        total, where = ragged_batch(make, sequences, block_size)
        return {
            "q_nope_THN": q_nope, "q_rope_THR": q_rope, "latent_TL": latents, "k_rope_TR": k_rope,
            "k_up_HNL": make.normal(H, N, L, scale=L**-0.5), "v_up_HVL": make.normal(H, V, L, scale=L**-0.5),
            "latent_cache": drawn_cache(make, total, block_size, L, R, cache), **where,
            "chosen_TK": _chosen(make, sequences, topk, T + more), "scale": (N + R) ** -0.5,
        }  # fmt: skip

    bucket = Bucket(kind, rows, rows, queries)  # type: ignore[arg-type]
    return Case(name, inputs, _TOLERANCE, _REASON, bucket, size, owned_rows, numbers)


_FP8: dict[str, Any] = {"cache": "float8_e4m3fn"}
_INT8: dict[str, Any] = {"cache": "int8"}
_ODD = (3, 24, 6, 36, 20)
_512 = (20, 32, 64, 512, 32)
_V32 = (128, 128, 64, 512, 128)
_BIG: dict[str, Any] = {"block_size": 64, "size": "real"}

CASES = (
    _case("decode_one", [(1, 37)]),
    _case("decode_first_token", [(1, 1)]),
    _case("decode_ragged", [(1, 1), (1, 7), (1, 8), (1, 9), (1, 100), (1, 333)], fused=True),
    _case("decode_empty", [(1, 65), (0, 0), (1, 5), (0, 0)], pad=2, more=3),
    _case("decode_nothing", [(0, 0)]),
    _case("decode_many", [(1, 1500), (1, 40), (1, 700)], topk=300),
    _case("decode_all", [(1, 90), (1, 64)], topk=128),
    _case("decode_odd", [(1, 50), (1, 129)], _ODD, 5),
    _case("decode_512", [(1, 1), (0, 0), (1, 64), (1, 333)], _512, 64, block_size=64, fused=True),
    _case("decode_fp8", [(1, 1), (1, 40), (0, 0), (1, 333)], topk=33, fused=True, **_FP8),
    _case("decode_int8", [(1, 1), (1, 40), (0, 0), (1, 333)], topk=33, **_INT8),
    _case("verify", [(4, 4), (1, 16), (3, 17), (0, 0), (2, 333)], queries=4, pad=5),
    _case("prompt", [(70, 70)], fused=True),
    _case("chunked", [(20, 60), (7, 130), (130, 400)], topk=16, more=5),
    _case("mixed", [(1, 77), (1, 16), (1, 1), (30, 30), (0, 0), (9, 100)], topk=40, fused=True, pad=7),
    _case("mixed_odd", [(1, 20), (41, 41), (3, 66)], _ODD, 11),
    _case("mixed_fp8", [(1, 77), (30, 30), (9, 100)], topk=40, **_FP8),
    _case("mixed_int8", [(1, 77), (30, 30), (9, 100)], topk=40, **_INT8),
    _case("decode_v32_b8_ctx32768", [(1, 32768)] * 8, _V32, 2048, **_BIG),
    _case("decode_v32_b32_ctx32768", [(1, 32768)] * 32, _V32, 2048, **_BIG),
    _case("prefill_v32_chunk2048_ctx16384", [(2048, 16384)], _V32, 2048, **_BIG),
)
