"""Inputs for latent_attention: ragged batches at small sizes, and the shapes of DeepSeek-V2-Lite and V3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.attention.latent_attention.op import latent_state, load, store
from graphllm.ops.attention.ragged_cases import Sequences, owned_rows, ragged_batch, tree_bits

_TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}
_REASON = (
    "float32 accumulation in tiles; in half precision keys and values, or queries and results in latent space, weights "
    "of the softmax and the result are rounded to the dtype once each"
)
_SMALL = (4, 32, 16, 64, 32)  # H, N, R, L, V


def _drawn(make: Maker, blocks: int, block_size: int, L: int, R: int, dtype: str) -> torch.Tensor:
    """A cache with tokens everywhere."""
    if not dtype:
        return make.normal(blocks, block_size, L + R)
    _, C = latent_state(L, R).typed({"cache": dtype}).shape
    latent_cache = torch.zeros(blocks, block_size, int(C), dtype=getattr(torch, dtype), device=make.device)
    block, slot = (i.flatten() for i in torch.meshgrid(torch.arange(blocks), torch.arange(block_size), indexing="ij"))
    store(latent_cache, block, slot, make.normal(len(block), L), make.normal(len(block), R))
    return latent_cache


def _numbers(name: str, latent_cache: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    """What the entries of a cache stand for."""
    blocks = torch.arange(latent_cache.shape[0], device=latent_cache.device)
    return torch.cat(load(latent_cache, blocks, args["latent_TL"].shape[1], torch.float64), 1)


def _case(
    name: str,
    sequences: Sequences,
    heads: tuple[int, int, int, int, int] = _SMALL,
    *,
    block_size: int = 16,
    fused: bool = False,
    pad: int = 0,
    queries: int = 1,
    size: Literal["small", "real"] = "small",
    cache: str = "",
    tree: Sequence[int] = (),
) -> Case:
    """One case.

    sequences: query tokens of each, and its length including them.
    heads: H, N, R, L, V.
    fused: rows are slices of wider ones.
    pad: rows after the last sequence's.
    queries: of a sequence in the bucket, if it has several and there are no prompts.
    cache: its dtype, if not that of the rest.
    tree: see `tree_bits`.
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
            "latent_cache": _drawn(make, total, block_size, L, R, cache), **where,
            "scale": (N + R) ** -0.5, "ancestors_T": tree_bits(make, sequences, tree, pad),
        }  # fmt: skip

    bucket = Bucket(kind, rows, rows, queries)  # type: ignore[arg-type]
    return Case(name, inputs, _TOLERANCE, _REASON, bucket, size, owned_rows, _numbers)


_FP8: dict[str, Any] = {"cache": "float8_e4m3fn"}
_INT8: dict[str, Any] = {"cache": "int8"}
_TREE, _WIDER_TREE = (-1, 0, 0, 1, 1, 2), (-1, 0, 0, 0, 1, 1, 2, 4, 5)
_ODD = (3, 24, 6, 36, 20)
_512 = (20, 32, 64, 512, 32)
_LITE, _64, _V3 = ((H, 128, 64, 512, 128) for H in (16, 64, 128))
_V3_RANK = (8, 128, 64, 512, 128)

CASES = (
    _case("decode_one", [(1, 37)]),
    _case("decode_first_token", [(1, 1)]),
    _case("decode_ragged", [(1, 1), (1, 16), (1, 17), (1, 100), (1, 333)], fused=True),
    _case("decode_empty", [(1, 65), (0, 0), (1, 5), (0, 0)], pad=2),
    _case("decode_nothing", [(0, 0)]),
    _case("decode_long", [(1, 1500), (1, 40), (1, 700)]),
    _case("decode_odd", [(1, 50), (1, 129)], _ODD),
    _case("decode_20_heads", [(1, 90), (1, 64)], (20, 32, 16, 64, 32), fused=True),
    _case("decode_block64", [(1, 63), (1, 64), (1, 65), (1, 200)], block_size=64),
    _case("decode_fp8", [(1, 1), (1, 40), (0, 0), (1, 333)], fused=True, **_FP8),
    _case("decode_int8", [(1, 1), (1, 40), (0, 0), (1, 333)], **_INT8),
    _case("decode_odd_fp8", [(1, 50), (1, 129)], _ODD, **_FP8),
    _case("decode_wide_fp8", [(1, 50), (1, 129)], (2, 32, 16, 260, 32), **_FP8),
    _case("decode_wide_int8", [(1, 50), (1, 129)], (2, 32, 16, 260, 32), **_INT8),
    _case("verify_ragged", [(4, 4), (1, 16), (3, 17), (0, 0), (4, 100), (2, 333)], queries=4, fused=True, pad=5),
    _case("verify_long_fp8", [(3, 1500), (4, 40)], queries=4, **_FP8),
    _case("decode_512", [(1, 1), (0, 0), (1, 64), (1, 65), (1, 333)], _512, fused=True),
    _case("verify_512", [(3, 3), (0, 0), (4, 66), (1, 333)], _512, block_size=64, queries=4, pad=2),
    _case("decode_512_fp8", [(1, 1), (0, 0), (1, 129)], _512, **_FP8),
    _case("verify_512_fp8", [(2, 50), (0, 0), (1, 129)], _512, queries=2, **_FP8),
    _case("verify_tree", [(6, 6), (6, 37), (0, 0), (6, 333)], queries=6, tree=_TREE, pad=3),
    _case("verify_tree_512", [(9, 70), (9, 9), (4, 333)], _512, block_size=64, queries=9, tree=_WIDER_TREE, **_FP8),
    _case("prompt", [(70, 70)], fused=True),
    _case("prompts_ragged", [(5, 5), (33, 33), (1, 1), (64, 64)]),
    _case("chunked", [(20, 60), (7, 130), (130, 400)]),
    _case("mixed", [(1, 77), (1, 16), (1, 1), (30, 30), (0, 0), (9, 100)], fused=True, pad=7),
    _case("mixed_odd", [(1, 20), (41, 41), (3, 66)], _ODD),
    _case("mixed_fp8", [(1, 77), (30, 30), (9, 100)], **_FP8),
    _case("mixed_int8", [(1, 77), (30, 30), (9, 100)], **_INT8),
    _case("mixed_wide", [(1, 77), (130, 333), (150, 150), (5, 40)], (2, 128, 64, 128, 128), fused=True),
    _case("mixed_wide_fp8", [(1, 77), (130, 200), (7, 7)], (2, 128, 64, 256, 128), **_FP8),
    _case("mixed_tree", [(6, 77), (30, 30), (0, 0), (1, 16), (6, 6), (9, 100)], tree=_TREE),
    *(_case(f"decode_lite_b{S}_ctx{n}", [(1, n)] * S, _LITE, block_size=64, size="real")
      for S, n in ((1, 512), (2, 1024), (32, 512), (32, 1024), (128, 512), (128, 4096))),
    _case("decode_64_heads_b128_ctx4096", [(1, 4096)] * 128, _64, block_size=64, size="real"),
    _case("decode_v3_b32_ctx1024", [(1, 1024)] * 32, _V3, block_size=64, size="real"),
    _case("decode_v3_b128_ctx4096_fp8", [(1, 4096)] * 128, _V3_RANK, block_size=64, size="real", **_FP8),
    _case("verify_tree_lite_b32_ctx1024", [(9, 1024)] * 32, _LITE, block_size=64, queries=9, size="real",
          tree=_WIDER_TREE),
    _case("verify_lite_b32_ctx1024", [(2, 1024)] * 32, _LITE, block_size=64, queries=2, size="real"),
    _case("prefill_lite_1x8192", [(8192, 8192)], _LITE, block_size=64, size="real"),
    _case("prefill_lite_chunk2048_ctx8192", [(2048, 8192)], _LITE, block_size=64, size="real"),
    _case("prefill_v3_1x4096", [(4096, 4096)], _V3, block_size=64, size="real"),
)  # fmt: skip
