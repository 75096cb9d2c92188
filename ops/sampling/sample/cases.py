"""Inputs for sample: every filter by itself and together, ties, banned tokens, rows of one batch that differ, real
vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_REASON = "token ids are exact: the same random bits, and thresholds that differ only between neighbouring logits"

# temperature, top_k, top_p, min_p of one row
_GREEDY = (0.0, 0, 1.0, 0.0)
_PLAIN = (1.0, 0, 1.0, 0.0)
_ROWS = (
    _GREEDY,
    _PLAIN,
    (0.6, 20, 0.95, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.5, 0, 1.0, 0.05),
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.5, 0.02),
    (0.3, 1, 1.0, 0.0),
    (2.0, 40, 0.99, 0.001),
    (1.0, 3, 0.3, 0.5),
)


def _case(
    name: str,
    rows: Sequence[tuple[float, int, float, float]],
    V: int,
    scale: float,
    size: str = "small",
    allowed: Sequence[int] = (),
    banned: float = float("-inf"),
) -> Case:
    """One case. rows: parameters of each sequence; scale: spread of the logits, small is flat.

    allowed: in turn, how many tokens of a row, anywhere, keep their logit; the others get ``banned``.
    """
    S = len(rows)

    def logits(make: Maker) -> Tensor:
        logits_SV = make.normal(S, V, scale=scale)
        if not allowed:
            return logits_SV
        kept_S = make.tensor([allowed[s % len(allowed)] for s in range(S)], torch.int64)
        order_SV = make.normal(S, V, dtype=torch.float32).argsort(dim=1).argsort(dim=1)
        return logits_SV.masked_fill(order_SV >= kept_S[:, None], banned)

    def inputs(make: Maker) -> dict[str, object]:
        temperature, top_k, top_p, min_p = zip(*rows, strict=True) if rows else ((), (), (), ())
        return {
            "logits_SV": logits(make),
            "temperature_S": make.tensor(temperature, torch.float32),
            "top_k_S": make.tensor(top_k, torch.int32),
            "top_p_S": make.tensor(top_p, torch.float32),
            "min_p_S": make.tensor(min_p, torch.float32),
            "seed_S": make.integers(-(2**62), 2**62, S, dtype=torch.int64),
            "sample_index_S": make.integers(0, 4096, S),
        }

    tolerance = {"float32": 0.0, "bfloat16": 0.0} if allowed else {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
    return Case(name, inputs, tolerance, _REASON, Bucket("decode", S, S), size)  # type: ignore[arg-type]


def _repeat(rows: Sequence[tuple[float, int, float, float]], S: int) -> list[tuple[float, int, float, float]]:
    return [rows[i % len(rows)] for i in range(S)]


_QWEN = 151936

CASES = (
    _case("nothing", [], 50, 1.0),
    _case("greedy", _repeat([_GREEDY], 5), 4099, 2.0),
    _case("greedy_ties", _repeat([_GREEDY], 5), 3000, 0.01),
    _case("one", [_PLAIN], 777, 3.0),
    _case("plain", _repeat([_PLAIN, (0.5, 0, 1.0, 0.0)], 6), 5000, 2.0),
    _case("mixed", _repeat(_ROWS, 20), 6007, 4.0),
    _case("mixed_flat", _repeat(_ROWS, 10), 9001, 0.5),
    _case("narrow", _repeat(_ROWS, 10), 33, 2.0),
    _case("k_of_all", [(1.0, 33, 1.0, 0.0), (1.0, 32, 1.0, 0.0), (1.0, 500, 0.9, 0.0)], 33, 2.0),
    _case("k_large", [(1.0, 3000, 1.0, 0.0), (1.0, 1500, 0.9, 0.0), (1.0, 1000, 1.0, 0.0)], 5000, 2.0),
    _case("k_ties", _repeat([(1.0, 7, 1.0, 0.0), (1.0, 7, 0.6, 0.0)], 8), 2500, 0.02),
    _case("p_nearly_one", [(1.0, 0, 0.9999, 0.0), (1.0, 0, 0.99999, 0.0)], 4000, 2.0),
    _case("flat_overflow", [(1.0, 0, 0.9, 0.0), (1.0, 3000, 0.8, 0.0), (1.0, 0, 1.0, 0.5)], 40001, 0.1),
    _case("all_banned", _ROWS, 99, 2.0, allowed=[0]),
    _case("all_nan", [_GREEDY, _PLAIN, (0.6, 20, 0.95, 0.0)], 2100, 2.0, allowed=[0], banned=float("nan")),
    _case("few_allowed", _repeat(_ROWS, 16), 2100, 2.0, allowed=[2, 4, 7, 0, 18, 1, 3]),
    _case("k_large_few", [(1.0, 2050, 1.0, 0.0), (1.0, 1024, 0.9, 0.1), (1.0, 5, 0.9, 0.0)], 2100, 2.0, allowed=[9]),
    _case("half_banned", _repeat(_ROWS, 10), 2600, 4.0, allowed=[1200]),
    _case("few_not_nan", _repeat(_ROWS, 8), 2100, 0.02, allowed=[3, 30], banned=float("nan")),
    *(_case(f"greedy_qwen_s{S}", _repeat([_GREEDY], S), _QWEN, 3.0, "real") for S in (1, 64, 256)),
    *(_case(f"plain_qwen_s{S}", _repeat([_PLAIN], S), _QWEN, 3.0, "real") for S in (1, 64, 256)),
    *(_case(f"k20_p95_qwen_s{S}", _repeat([(0.6, 20, 0.95, 0.0)], S), _QWEN, 3.0, "real") for S in (1, 64, 256)),
    *(_case(f"p95_qwen_s{S}", _repeat([(0.7, 0, 0.95, 0.0)], S), _QWEN, 4.0, "real") for S in (1, 64, 256)),
    *(_case(f"mixed_qwen_s{S}", _repeat(_ROWS, S), _QWEN, 3.0, "real") for S in (64, 256)),
    _case("grammar_qwen_s64", _repeat([(0.6, 20, 0.95, 0.0)], 64), _QWEN, 3.0, "real", allowed=[1, 10, 300, 50000]),
    _case("mixed_banned_qwen_s64", _repeat(_ROWS, 64), _QWEN, 3.0, "real", allowed=[0, 1, 5, 39, 4000, 70000, 151000]),
    _case("flat_p_qwen_s64", _repeat([(1.0, 0, 0.9, 0.0)], 64), _QWEN, 1.0, "real"),
)
