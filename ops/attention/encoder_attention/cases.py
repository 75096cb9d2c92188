"""Inputs for encoder_attention: ragged batches at small sizes, the shapes of BERT, MiniLM and ModernBERT models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 3e-6, "bfloat16": 8e-3, "float16": 1e-3}
_REASON = (
    "float32 accumulation in tiles, with exp2 of the fast kind; in half precision the softmax weights and the result "
    "are rounded to the dtype once each (bf16 keeps 8 bits, fp16 11; Triton's interpreter cuts where a GPU rounds)"
)


def _owned_rows(out_THE: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    return out_THE[: int(args["query_start_loc"][-1])]


def _case(
    name: str,
    lengths: Sequence[int],
    heads: tuple[int, int, int] = (4, 4, 32),
    *,
    window: int = 0,
    fused: bool = False,
    rotated: bool = False,
    pad: int = 0,
    size: str = "small",
) -> Case:
    """One case. heads: H, K, E; fused: q, k, v are slices; rotated: of these q and k are made
    anew. pad: rows after the last sequence's."""
    H, K, E = heads
    T = sum(lengths) + pad
    kind = "decode" if max(lengths, default=0) <= 1 else "mixed"

    def inputs(make: Maker) -> dict[str, object]:
        if fused or rotated:
            qkv = make.normal(T, (H + 2 * K) * E)
            q, k, v = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, K * E, K * E], dim=1))
            q, k = (q.contiguous(), k.contiguous()) if rotated else (q, k)
        else:
            q, k, v = make.normal(T, H, E), make.normal(T, K, E), make.normal(T, K, E)
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        return {
            "q_THE": q, "k_TKE": k, "v_TKE": v, "query_start_loc": make.tensor(starts, torch.int32),
            "scale": E**-0.5, "window": window,
        }  # fmt: skip

    return Case(name, inputs, _TOLERANCE, _REASON, Bucket(kind, T, T), size, _owned_rows)  # type: ignore[arg-type]


_BERT, _MINILM, _LARGE = (12, 12, 64), (12, 12, 32), (16, 16, 64)
_MANY = [16, 24, 32, 48, 64, 100, 128, 256, 384, 512]

CASES = (
    _case("nothing", [0]),
    _case("one_token", [1]),
    _case("single_tokens", [1, 1, 0, 1], pad=2),
    _case("one", [70], fused=True),
    _case("ragged", [5, 33, 1, 64], fused=True),
    _case("ragged_long", [17, 300, 16, 65], (2, 2, 64)),
    _case("empty_ends", [0, 17, 0], pad=47),
    _case("head128", [40, 65], (2, 2, 128), fused=True),
    _case("rotated", [40, 65], (4, 2, 64), rotated=True),
    _case("head80", [40, 20], (2, 2, 80)),
    _case("head16", [40, 20], (2, 2, 16)),
    _case("grouped", [41, 3], (8, 2, 64)),
    _case("window", [90, 200, 1, 50], window=16),
    _case("window_wide", [300, 40, 170], (2, 2, 32), window=150, fused=True),
    _case("window_one", [33, 64], window=1),
    _case("window_head128", [150, 33], (2, 1, 128), window=20),
    _case("bert_1x128", [128], _BERT, fused=True, size="real"),
    _case("bert_1x512", [512], _BERT, fused=True, size="real"),
    _case("bert_ragged", _MANY, _BERT, fused=True, size="real"),
    _case("minilm_64x32", [32] * 64, _MINILM, fused=True, size="real"),
    _case("minilm_ragged", _MANY, _MINILM, fused=True, size="real"),
    _case("large_16x512", [512] * 16, _LARGE, fused=True, size="real"),
    _case("modernbert_window_1x8192", [8192], _BERT, window=64, size="real"),
)
