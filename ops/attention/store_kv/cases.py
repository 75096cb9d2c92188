"""Inputs for store_kv: prompts and single tokens over the ends of blocks, in every kind of cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(
    name: str, sequences: Sequence[tuple[int, int]], heads: tuple[int, int] = (2, 32), *, P: int = 16, cache: str = "",
    pad: int = 0, fused: bool = False, scales: tuple[float, float] | None = None,
    size: Literal["small", "real"] = "small",
) -> Case:  # fmt: skip
    """One case. sequences: (rows, tokens including them) of each; heads: K, E. pad: rows that belong to none. fused:
    keys and values are slices."""
    (K, E), S = heads, len(sequences)
    T = sum(n for n, _ in sequences) + pad

    def inputs(make: Maker) -> dict[str, Any]:
        blocks = [-(-length // P) for _, length in sequences]
        table = torch.zeros(S, max(1, *blocks) + 1, dtype=torch.int32)
        order = torch.randperm(sum(blocks), generator=make.generator, device=make.generator.device).cpu() + 1
        for s, n in enumerate(blocks):
            used = sum(blocks[:s])
            table[s, :n] = order[used : used + n]
        dtype = getattr(torch, cache) if cache else make.dtype
        k, v = (make.normal(T, K, E, scale=20.0) for _ in range(2))
        if fused:
            k, v = torch.cat([k, v], 1).split(K, 1)
        return {
            "k_TKE": k, "v_TKE": v,
            "kv_cache": make.normal(sum(blocks) + 1, 2, K, P, E + 4 * (cache == "int8")).to(dtype),
            "block_table": table.to(make.device),
            "query_start_loc": make.tensor([sum(n for n, _ in sequences[:i]) for i in range(S + 1)], torch.int32),
            "seq_lens": make.tensor([length for _, length in sequences], torch.int32),
            "kv_scales": None if scales is None else make.tensor(scales, torch.float32),
        }  # fmt: skip

    exact = dict.fromkeys(("float32", "bfloat16", "float16"), 0.0)
    return Case(name, inputs, exact, "rows are copied, or rounded the one right way", Bucket("mixed", T, T), size)


CASES = (
    _case("nothing", [(0, 0)]),
    _case("one", [(1, 1)]),
    _case("ragged", [(5, 5), (0, 0), (33, 70), (1, 17), (4, 18)], pad=3, fused=True),
    _case("small_blocks", [(9, 13), (2, 4)], (3, 20), P=4),
    _case("fp8", [(9, 13), (40, 40)], cache="float8_e4m3fn", scales=(0.05, 0.5)),
    _case("int8", [(9, 13), (40, 40), (1, 16)], cache="int8"),
    _case("8b_2048", [(2048, 4096)], (8, 128), size="real"),
    _case("8b_b32_q4", [(4, 4096)] * 32, (8, 128), size="real"),
)
