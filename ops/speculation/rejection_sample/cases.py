"""Inputs for rejection_sample: drafts likely, unlikely, banned and absent, every filter, with probabilities, as typical
acceptance, for benchmarks, and without anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_REASON = "token ids are exact: the same random bits, and probabilities that differ by rounding only"

# temperature, top_k, top_p, min_p of one row
_ROWS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.5, 0, 1.0, 0.05),
    (0.7, 5, 1.0, 0.0),
    (1.0, 3, 0.3, 0.5),
)


def _case(
    name: str, S: int, V: int, K: int = 3, near: float = 0.5, typical: float = 0.0, synthetic: float = 0.0,
    banned: int = 0, size: str = "small", rows: Sequence[tuple[float, int, float, float]] = _ROWS,
) -> Case:  # fmt: skip
    """One case of S sequences with K drafts each. K of 0: no probabilities. near: how far q is from p. banned: tokens
    with logits of -inf, drafts among them."""
    each = (K or 3) + 1
    R, N = S * each, S + 1

    def inputs(make: Maker) -> dict[str, object]:
        logits = make.normal(R, V, scale=2.0)
        noise = make.normal(N, K or 3, V, dtype=torch.float32, scale=near)
        own = logits.float().reshape(S, each, V)[:, :-1] if R else logits.float().new_zeros((0, K or 3, V))
        q = torch.softmax(torch.cat([own, own.new_zeros((1, K or 3, V))]) + noise, dim=-1)
        drafts = (q + make.normal(N, K or 3, V, dtype=torch.float32, scale=0.02)).argmax(-1)[:S]
        drafts = torch.cat([drafts, torch.full_like(drafts[:, :1], -1)], dim=1)
        logits[:, :banned] = float("-inf")
        chosen = [rows[r % len(rows)] for r in range(R)]
        temperature, top_k, top_p, min_p = zip(*chosen, strict=True) if chosen else ((), (), (), ())
        return {
            "logits_RV": logits,
            "temperature_R": make.tensor(temperature, torch.float32), "top_k_R": make.tensor(top_k, torch.int32),
            "top_p_R": make.tensor(top_p, torch.float32), "min_p_R": make.tensor(min_p, torch.float32),
            "seed_R": make.integers(-(2**62), 2**62, R, dtype=torch.int64), "sample_index_R": make.integers(0, 4096, R),
            "drafts_R": drafts.reshape(-1).int(),
            "slots_R": make.tensor([s for s in range(S) for _ in range(each)], torch.int32),
            "place_R": make.tensor([*range(each)] * S, torch.int32),
            "draft_probs_NKV": q if K else None,
            "typical_threshold": typical, "typical_alpha": 0.3 if typical else 0.0, "synthetic_rate": synthetic,
        }  # fmt: skip

    tolerance = {"float32": 0.0, "bfloat16": 0.0}
    return Case(name, inputs, tolerance, _REASON, Bucket("decode", S, S, each), size)  # type: ignore[arg-type]


_QWEN = 151936

CASES = (
    _case("nothing", 0, 50),
    _case("near", 7, 301),
    _case("far", 7, 2600, near=3.0),
    _case("narrow", 5, 13, K=1),
    _case("same", 7, 500, near=0.0, rows=((1.0, 0, 1.0, 0.0),)),
    _case("banned", 7, 40, K=2, banned=30),
    _case("typical", 7, 300, K=0, typical=0.09),
    _case("synthetic", 7, 300, K=0, synthetic=0.8),
    _case("one_hot", 7, 300, K=0),
    *(_case(f"qwen_s{S}", S, _QWEN, size="real") for S in (1, 8)),
    _case("typical_qwen_s8", 8, _QWEN, K=0, typical=0.09, size="real"),
)
