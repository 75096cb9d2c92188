"""Inputs for paged_attention: ragged batches at small sizes, the decode and prefill shapes of 8B and 0.6B models; and
batches of those with whole, partial and normalized rotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.attention.paged_attention.op import store
from graphllm.ops.attention.ragged_cases import owned_rows, ragged_batch, tree_bits

_TOLERANCE = {"float32": 3e-6, "bfloat16": 8e-3, "float16": 1e-3}
_REASON = (
    "float32 accumulation in tiles, with exp2 of the fast kind; in half precision the softmax weights and the result "
    "are rounded to the dtype once each (bf16 keeps 8 bits, fp16 11; Triton's interpreter cuts where a GPU rounds)"
)


def _drawn(make: Maker, shape: tuple[int, ...], dtype: str, kv_scales: torch.Tensor | None) -> torch.Tensor:
    """A cache with keys and values everywhere."""
    plain = make.normal(*shape)
    if not dtype:
        return plain
    B, _, K, P, E = shape
    kv_cache = torch.zeros(B, 2, K, P, E + 4 * (dtype == "int8"), dtype=getattr(torch, dtype), device=make.device)
    block, slot = (i.flatten() for i in torch.meshgrid(torch.arange(B), torch.arange(P), indexing="ij"))
    for kind in (0, 1):
        scale = None if kv_scales is None else kv_scales[kind]
        store(kv_cache, kind, block, slot, plain[block, kind, :, slot], scale)
    return kv_cache


def _case(
    name: str,
    sequences: Sequence[tuple[int, int]],
    heads: tuple[int, int, int] = (4, 2, 64),
    *,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    fused: bool = False,
    pad: int = 0,
    least: int = 0,
    most: int = 0,
    queries: int = 1,
    size: str = "small",
    cache: str = "",
    scales: tuple[float, float] | None = None,
    tree: Sequence[int] = (),
) -> Case:
    """One case. sequences: (query tokens, length including them) of each; heads: H, K, E; fused: q, k, v are slices.

    sinks: whether there are some, each about as strong as a few tokens. pad: rows after the last sequence's, with
    output that is not specified. least, most: of the bucket, if it holds other batches. queries: of a sequence in the
    bucket, if it has several and there are no prompts. cache: its dtype, if not that of the rest. tree: of each node of
    one the node before it; sequences of as many tokens verify it. Of a block, zeros.
    """
    H, K, E = heads
    T, S = sum(n for n, _ in sequences) + pad, len(sequences)
    kind = "decode" if all(n <= queries for n, _ in sequences) else "mixed"
    rows = T if queries == 1 else S

    def inputs(make: Maker) -> dict[str, object]:
        if fused:
            qkv = make.normal(T, (H + 2 * K) * E)
            q, k, v = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, K * E, K * E], dim=1))
        else:
            q, k, v = make.normal(T, H, E), make.normal(T, K, E), make.normal(T, K, E)
        total, where = ragged_batch(make, sequences, block_size)
        kv_scales = None if scales is None else make.tensor(scales, torch.float32)
        kv_cache = _drawn(make, (total, 2, K, block_size, E), cache, kv_scales)
        return {
            "q_THE": q, "k_TKE": k, "v_TKE": v, "kv_cache": kv_cache, **where,
            "scale": E**-0.5, "window": window, "softcap": softcap,
            "sinks_H": make.normal(H, scale=2.0) if sinks else None, "kv_scales": kv_scales,
            "ancestors_T": tree_bits(make, sequences, tree, pad),
        }  # fmt: skip

    bucket = Bucket(kind, least or rows, max(rows, most), queries)  # type: ignore[arg-type]
    return Case(name, inputs, _TOLERANCE, _REASON, bucket, size, owned_rows)  # type: ignore[arg-type]


_FP8: dict[str, Any] = {"cache": "float8_e4m3fn"}
_SCALED: dict[str, Any] = _FP8 | {"scales": (0.05, 0.0078)}  # some values are larger than fp8 holds
_INT8: dict[str, Any] = {"cache": "int8"}
_TREE = (-1, 0, 0, 1, 1, 2)  # two drafts: the first has two after it, the second one
_WIDE = (-1, *(i // 3 for i in range(21)))
_BLOCK, _LONG_BLOCK = (0,) * 6, (0,) * 33
_8B, _06B = (32, 8, 128), (16, 8, 128)

_PLAIN = (
    _case("decode_one", [(1, 37)]),
    _case("decode_first_token", [(1, 1)]),
    _case("decode_ragged", [(1, 1), (1, 16), (1, 17), (1, 100), (1, 333)]),
    _case("decode_empty", [(1, 65), (0, 0), (1, 5), (0, 0)], pad=2),
    _case("decode_long", [(1, 1500), (1, 40), (1, 700)], (2, 1, 32)),
    _case("decode_mha", [(1, 50), (1, 129)], (3, 3, 32)),
    _case("decode_group7_fused", [(1, 90), (1, 64)], (14, 2, 64), fused=True),
    _case("decode_mqa", [(1, 90), (1, 64)], (8, 1, 80)),
    _case("decode_group24", [(1, 70)], (24, 1, 16)),
    _case("decode_window", [(1, 1), (1, 20), (1, 200), (1, 129)], window=20),
    _case("decode_window_one", [(1, 33), (1, 64)], window=1),
    _case("decode_softcap", [(1, 120), (1, 7)], softcap=2.0),
    _case("decode_block32_fused", [(1, 31), (1, 32), (1, 33), (1, 150)], (8, 1, 128), block_size=32, fused=True),
    _case("decode_block128_head96", [(1, 127), (1, 128), (1, 300)], (4, 4, 96), block_size=128),
    _case("decode_nothing", [(0, 0)]),
    _case("decode_two_heads", [(1, 1), (0, 0), (1, 2100), (1, 33)], (8, 4, 32), most=256, fused=True),
    _case("decode_four_heads", [(1, 16), (1, 2100), (1, 64)], (16, 8, 32), most=256, fused=True),
    _case("decode_four_heads_group4", [(1, 130), (1, 1), (1, 65)], (32, 8, 16), most=256, block_size=64),
    _case("decode_four_heads_window", [(1, 90), (1, 17)], (4, 4, 32), most=512, window=20),
    _case("decode_few_of_many", [(1, 2400), (1, 1100)], (4, 2, 32), least=2, most=64, fused=True),
    _case("decode_few_of_many_window", [(1, 2600), (0, 0)], (2, 2, 32), least=2, most=64, window=2500, sinks=True),
    _case("decode_sinks", [(1, 1), (1, 40), (0, 0), (1, 333)], (8, 2, 32), sinks=True),
    _case("decode_sinks_window", [(1, 3), (1, 200)], (3, 3, 64), sinks=True, window=20),
    _case("decode_sinks_ranges", [(1, 1500), (1, 40), (1, 700)], (14, 2, 64), sinks=True, fused=True),
    _case("decode_four_heads_sinks", [(1, 16), (1, 2100), (1, 64)], (16, 8, 32), most=256, sinks=True),
    _case("verify_one", [(4, 37)], queries=4),
    _case("verify_ragged", [(4, 4), (1, 16), (3, 17), (0, 0), (4, 100), (2, 333)], queries=4, fused=True, pad=5),
    _case("verify_ranges", [(3, 1500), (4, 40), (1, 700)], (2, 1, 32), queries=4),
    _case("verify_group7_head80", [(5, 90), (5, 64)], (14, 2, 80), queries=5),
    _case("verify_window", [(4, 4), (4, 20), (4, 200), (3, 130)], queries=4, window=20),
    _case("verify_window_ranges", [(5, 1500), (2, 700)], (4, 2, 32), queries=5, window=1000),
    _case("verify_window_two", [(4, 33), (3, 67), (2, 2)], queries=4, window=2),
    _case("verify_softcap_sinks", [(2, 120), (3, 7)], (6, 2, 32), queries=3, softcap=2.0, sinks=True),
    _case("verify_sinks_ranges", [(4, 1500), (4, 40)], (14, 2, 64), queries=4, sinks=True, fused=True),
    _case("verify_many", [(2, 2100), (2, 64), (1, 17)], (16, 8, 32), queries=2, most=256, block_size=32),
    _case("verify_few_of_many", [(3, 2400), (2, 900)], (4, 2, 32), least=2, queries=3, most=64),
    _case("verify_fp8", [(4, 4), (3, 40), (0, 0), (4, 333)], (8, 2, 32), queries=4, **_SCALED),
    _case("verify_too_many_rows", [(9, 70), (3, 20)], (8, 1, 32), queries=9),
    _case("verify_tree", [(6, 6), (6, 37), (0, 0), (6, 333)], queries=6, tree=_TREE, fused=True, pad=3),
    _case("verify_tree_ranges", [(6, 1500), (6, 40)], (2, 1, 32), queries=6, tree=_TREE, sinks=True),
    _case("verify_tree_window", [(6, 6), (6, 20), (6, 200)], (8, 2, 80), queries=6, tree=_TREE, window=3),
    _case("verify_tree_window_two", [(6, 33), (6, 67)], queries=6, tree=_TREE, window=2),
    _case("verify_tree_softcap_fp8", [(6, 70), (6, 16)], (4, 2, 32), queries=6, tree=_TREE, softcap=2.0, **_SCALED),
    _case("verify_wide_tree", [(22, 22), (22, 150), (22, 40)], (2, 1, 64), queries=22, tree=_WIDE),
    _case("verify_wide_tree_window", [(22, 22), (22, 150)], (2, 1, 64), queries=22, tree=_WIDE, window=4),
    _case("verify_tree_too_many_rows", [(22, 150), (22, 40)], (8, 1, 32), queries=22, tree=_WIDE),
    _case("block", [(6, 6), (6, 37), (0, 0), (6, 333)], queries=6, tree=_BLOCK, fused=True, pad=3),
    _case("block_ranges_fp8", [(6, 1500), (6, 40)], (2, 1, 32), queries=6, tree=_BLOCK, **_SCALED),
    _case("block_too_many_rows", [(33, 150), (33, 33), (33, 100)], (8, 1, 32), queries=33, tree=_LONG_BLOCK),
    _case("prompt_one_token", [(1, 1), (2, 2)]),
    _case("prompt", [(133, 133)], fused=True),
    _case("prompts_ragged", [(5, 5), (33, 33), (1, 1), (64, 64)]),
    _case("chunked", [(70, 110), (7, 130)]),
    _case("mixed", [(1, 77), (30, 30), (0, 0), (1, 16), (9, 100), (1, 1)], fused=True),
    _case("mixed_empty_ends", [(0, 0), (17, 40), (0, 0)], pad=47),
    _case("mixed_group7", [(41, 41), (1, 65), (3, 66)], (14, 2, 64)),
    _case("mixed_mha_head80", [(35, 50), (1, 20)], (2, 2, 80)),
    _case("mixed_group8_head128", [(35, 50), (1, 20)], (8, 1, 128)),
    _case("mixed_head16", [(35, 50), (1, 20)], (2, 1, 16), block_size=32),
    _case("mixed_window", [(90, 200), (1, 70), (50, 50)], window=33),
    _case("mixed_window_wide", [(70, 300), (1, 170)], (2, 1, 32), window=150),
    _case("mixed_softcap_window", [(40, 70), (1, 70)], softcap=3.0, window=18),
    _case("mixed_sinks", [(1, 77), (30, 30), (0, 0), (9, 100), (1, 1)], (8, 1, 64), sinks=True, fused=True),
    _case("mixed_sinks_window_softcap", [(40, 70), (1, 70), (3, 60)], sinks=True, softcap=3.0, window=18),
    _case("mixed_few_behind_contexts", [(16, 1100), (0, 0), (1, 700), (5, 5), (30, 300)], (8, 2, 32), fused=True),
    _case("mixed_few_window", [(7, 900), (40, 560), (3, 8)], (4, 2, 32), window=500, sinks=True),
    _case("mixed_few_tree", [(6, 900), (20, 560)], (14, 2, 32), tree=_TREE),
    _case("mixed_block128", [(150, 150), (1, 129)], (2, 1, 32), block_size=128),
    _case("mixed_head256", [(1, 60), (40, 90), (9, 9)], (4, 1, 256), fused=True),
    _case("mixed_head256_window_sinks", [(70, 70), (1, 30)], (2, 1, 256), window=40, sinks=True),
    _case("mixed_head128_chunks", [(1, 300), (150, 400), (0, 0), (129, 129), (2, 513)], (4, 1, 128), fused=True),
    _case("mixed_window_chunks", [(70, 400), (140, 290), (1, 90), (33, 150)], window=150, block_size=64, sinks=True),
    _case("mixed_tree", [(6, 77), (30, 30), (0, 0), (1, 16), (6, 6), (9, 100)], tree=_TREE, fused=True),
    _case("mixed_tree_window", [(6, 77), (60, 130), (6, 200), (6, 6)], (2, 1, 80), tree=_TREE, window=20),
    _case("mixed_wide_tree_window_int8", [(22, 70), (60, 70), (22, 22)], (8, 1, 32), tree=_WIDE, window=3, **_INT8),
    _case("mixed_wide_tree_sinks", [(22, 70), (40, 70), (22, 130)], (14, 2, 64), tree=_WIDE, sinks=True),
    _case("mixed_block", [(6, 77), (30, 30), (0, 0), (6, 6), (9, 100)], tree=_BLOCK),
    _case("mixed_long_block_int8", [(33, 70), (60, 70), (33, 33)], (8, 1, 32), tree=_LONG_BLOCK, **_INT8),
    _case("decode_fp8", [(1, 1), (1, 40), (0, 0), (1, 333)], (8, 2, 32), **_SCALED),
    _case("decode_fp8_group7", [(1, 90), (1, 64)], (14, 2, 64), fused=True, **_FP8),
    _case("decode_fp8_ranges", [(1, 1500), (1, 40), (1, 700)], (14, 2, 64), sinks=True, fused=True, **_SCALED),
    _case("decode_fp8_four_heads", [(1, 16), (1, 2100), (1, 64)], (16, 8, 32), most=256, **_SCALED),
    _case("decode_fp8_window_softcap", [(1, 3), (1, 200)], (3, 3, 80), softcap=2.0, window=20, **_SCALED),
    _case("mixed_fp8", [(1, 77), (30, 30), (0, 0), (9, 100), (1, 1)], fused=True, **_SCALED),
    _case("mixed_fp8_window_softcap", [(40, 70), (1, 70), (3, 60)], (2, 1, 80), softcap=3.0, window=18, **_FP8),
    _case("decode_int8", [(1, 1), (1, 40), (0, 0), (1, 333)], (8, 2, 32), sinks=True, **_INT8),
    _case("decode_int8_window_softcap", [(1, 3), (1, 200)], (3, 3, 80), softcap=2.0, window=20, **_INT8),
    _case("mixed_int8", [(1, 77), (30, 30), (0, 0), (9, 100), (1, 1)], fused=True, **_INT8),
    _case("mixed_int8_window", [(90, 200), (1, 70), (50, 50)], (2, 1, 36), window=33, **_INT8),
    *(_case(f"verify_tree_8b_b{S}_ctx4096", [(6, 4096)] * S, _8B, queries=6, tree=_TREE, size="real") for S in (1, 32)),
    *(_case(f"verify_8b_b{S}_ctx{n}", [(4, n)] * S, _8B, queries=4, size="real") for S in (1, 32) for n in (512, 4096)),
    *(_case(f"decode_8b_b{S}_ctx{n}", [(1, n)] * S, _8B, size="real") for S in (1, 32, 128) for n in (512, 4096)),
    *(_case(f"decode_06b_b{S}_ctx{n}", [(1, n)] * S, _06B, size="real") for S in (1, 64, 256) for n in (384, 2048)),
    _case("decode_8b_b128_uneven", [(1, 64 + 31 * i) for i in range(128)], _8B, size="real"),
    _case("decode_8b_b256_ctx512", [(1, 512)] * 256, _8B, size="real"),
    _case("decode_8b_b256_ctx512_fp8", [(1, 512)] * 256, _8B, size="real", **_FP8),
    _case("prefill_8b_1x8192_fp8", [(8192, 8192)], _8B, size="real", **_FP8),
    _case("prefill_8b_1x8192", [(8192, 8192)], _8B, size="real"),
    _case("prefill_8b_32x1024", [(1024, 1024)] * 32, _8B, size="real"),
    _case("prefill_8b_chunk2048_ctx8192", [(2048, 8192)], _8B, size="real"),
    _case("prefill_8b_1x128", [(128, 128)], _8B, size="real"),
    _case("prefill_06b_32x1024", [(1024, 1024)] * 32, _06B, size="real"),
    _case("decode_8b_b2_ctx32768", [(1, 32768)] * 2, _8B, size="real"),
    _case("mixed_8b_8x32768_1x2048", [(1, 32768)] * 8 + [(2048, 2048)], _8B, size="real"),
    _case("mixed_8b_2x4x32768_1x1024", [(4, 32768)] * 2 + [(1024, 1024)], _8B, size="real"),
    _case("mixed_8b_128x1024_2x1024", [(1, 1024)] * 128 + [(1024, 1024)] * 2, _8B, size="real"),
)

_ROTATED_TOLERANCE = {"float32": 4e-6, "bfloat16": 2.5e-2, "float16": 2e-3}
_ROTATED = _REASON + "; norm and rotation round queries and keys up to four times more"
# A key between two entries of 8 bits that is rounded otherwise is off by an eighth; the tolerance allows for their
# number in the ragged cases.
_ROTATED_TOLERANCE_FP8 = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
_ROTATED_FP8 = _ROTATED + ", and may fall to the other side of a tie in 8 bits"


def _rotated(batch: str, rotated: float = 1.0, norm: bool = False) -> Case:
    """The batch of that name; rotated: share of the head that rotates."""
    tolerance, reason = (_ROTATED_TOLERANCE, _ROTATED) if "fp8" not in batch else (_ROTATED_TOLERANCE_FP8, _ROTATED_FP8)
    (base,) = (c for c in _PLAIN if c.name == batch)

    def inputs(make: Maker) -> dict[str, object]:
        args = base.inputs(make)
        T, _, E = args["q_THE"].shape
        F = max(1, int(E * rotated) // 2)
        angles = make.normal(T, F).float()
        tables = {"cos_TF": angles.cos(), "sin_TF": angles.sin()}
        if make.dtype.itemsize == 8:
            tables = {name: t.double() for name, t in tables.items()}
        norms = {"q_norm_E": make.normal(E), "k_norm_E": make.normal(E), "eps": 1e-6} if norm else {}
        return args | tables | norms

    name = f"{batch}_rotate{rotated:g}" + ("_norm" if norm else "")
    return dataclasses.replace(base, name=name, inputs=inputs, tolerance=tolerance, reason=reason)


CASES = (
    *_PLAIN,
    _rotated("decode_ragged"),
    _rotated("decode_group7_fused", norm=True),
    _rotated("decode_mqa", 0.5, norm=True),
    _rotated("decode_long", norm=True),
    _rotated("decode_empty", 0.5),
    _rotated("decode_nothing"),
    _rotated("decode_fp8", norm=True),
    _rotated("verify_ragged"),
    _rotated("verify_group7_head80", 0.5, norm=True),
    _rotated("verify_fp8", norm=True),
    _rotated("mixed_fp8"),
    _rotated("prompt", norm=True),
    _rotated("mixed", norm=True),
    _rotated("mixed_mha_head80", 0.25),
    _rotated("mixed_head256", 0.25, norm=True),
    _rotated("mixed_head256_window_sinks", norm=True),
    _rotated("mixed_group8_head128", 0.5),
    _rotated("mixed_window"),
    _rotated("mixed_head128_chunks", norm=True),
    _rotated("mixed_window_chunks"),
    _rotated("decode_sinks_ranges"),
    _rotated("mixed_sinks"),
    *(_rotated(f"decode_8b_b{S}_ctx512") for S in (1, 32, 128)),
    *(_rotated(f"decode_06b_b{S}_ctx384", norm=True) for S in (1, 64, 256)),
    _rotated("prefill_8b_1x8192"),
    _rotated("mixed_8b_128x1024_2x1024"),
    _rotated("verify_8b_b1_ctx4096"),
    _rotated("verify_8b_b32_ctx4096"),
    _rotated("decode_8b_b32_ctx4096"),
    _rotated("verify_tree", norm=True),
    _rotated("mixed_tree"),
)
