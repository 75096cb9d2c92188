"""Inputs for token_logprobs: rows not wanted, ties, banned and missing tokens, k beyond the vocabulary, real sizes.

Each comes twice: the log-probabilities with a tolerance, ranks and ids exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _logprobs(out: Tensor, args: Mapping[str, Any]) -> Tensor:
    return torch.cat([out[:, :1], out[:, 2 : 2 + args["k"]]], dim=1)


def _ids(out: Tensor, args: Mapping[str, Any]) -> Tensor:
    return torch.cat([out[:, 1:2], out[:, 2 + args["k"] :]], dim=1).long()


def _cases(
    name: str,
    S: int,
    V: int,
    k: int,
    scale: float = 3.0,
    size: str = "small",
    wanted: tuple[int, ...] = (3, 0, -1, 20),
    allowed: int | None = None,
    banned: float = float("-inf"),
) -> Iterator[Case]:
    """scale: spread of the logits, small gives ties. wanted: of the rows in turn. allowed: how many tokens of a row,
    anywhere, keep their logit; the others get ``banned``."""

    def inputs(make: Maker) -> dict[str, object]:
        logits_SV = make.normal(S, V, scale=scale)
        if allowed is not None:
            order_SV = make.normal(S, V, dtype=torch.float32).argsort(dim=1).argsort(dim=1)
            logits_SV = logits_SV.masked_fill(order_SV >= allowed, banned)
        return {
            "logits_SV": logits_SV,
            "tokens_S": make.integers(-V // 8, V, S).clamp(min=-1),
            "target_S": make.integers(-V, V, S).clamp(min=-1),
            "wanted_S": make.tensor([wanted[s % len(wanted)] for s in range(S)], torch.int32),
            "k": k,
        }

    for part, specified, tolerance, reason in (
        ("logprobs", _logprobs, 1e-6, "a float32 sum of exponentials of the logits as they are"),
        ("ids", _ids, 0.0, "comparisons are exact"),
    ):
        tolerances = {"float32": tolerance, "bfloat16": tolerance, "float16": tolerance}
        bucket = Bucket("decode", S, S)
        yield Case(f"{name}_{part}", inputs, tolerances, reason, bucket, size, specified)  # type: ignore[arg-type]


_QWEN = 151936

CASES = (
    *_cases("nothing", 0, 50, 5),
    *_cases("one", 1, 3000, 20),
    *_cases("several", 9, 4099, 8),
    *_cases("flat", 4, 4500, 8, scale=0.01),
    *_cases("ties", 3, 2500, 5, scale=0.0),
    *_cases("no_top", 5, 300, 0),
    *_cases("all_of_them", 3, 13, 13),
    *_cases("beyond_all", 3, 11, 14),
    *_cases("unwanted", 4, 2100, 5, wanted=(-1,)),
    *_cases("banned", 4, 4200, 8, allowed=5),
    *_cases("all_banned", 2, 2100, 3, allowed=0),
    *_cases("nan", 3, 2100, 8, allowed=5, banned=float("nan")),
    *(c for S in (1, 64, 256) for c in _cases(f"qwen_s{S}", S, _QWEN, 20, size="real", wanted=(20,))),
    *_cases("few_wanted_qwen_s256", 256, _QWEN, 20, size="real", wanted=(5, -1, -1, -1, -1, -1, -1, -1)),
    *_cases("flat_qwen_s64", 64, _QWEN, 20, scale=0.01, size="real"),
)
