"""What tests of sampling share: combinations of filters, their exact probabilities in float64, and chi-squared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

V, DRAWS, LEAST_P = 61, 20_000, 1e-4


class Filters(NamedTuple):
    """One combination. banned: tokens with a logit of -inf."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    banned: int = 0


COMBINATIONS = [
    Filters(),
    Filters(temperature=0.5),
    Filters(temperature=2.0),
    Filters(top_k=7),
    Filters(top_p=0.8),
    Filters(min_p=0.1),
    Filters(0.7, top_k=12, top_p=0.9),
    Filters(1.3, top_k=20, min_p=0.05),
    Filters(0.9, top_p=0.7, min_p=0.02),
    Filters(1.5, top_k=25, top_p=0.95, min_p=0.03),
    Filters(banned=50),
    Filters(0.8, top_k=20, top_p=0.95, banned=52),
]


def on_gpu(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A Triton kernel given tensors of the host: on a GPU where there is one, in the interpreter elsewhere."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(*args: Any, **named: Any) -> Tensor:
        moved = [x.to(device) if isinstance(x, Tensor) else x for x in (*args, *named.values())]
        return kernel(*moved[: len(args)], **dict(zip(named, moved[len(args) :], strict=True))).cpu()

    return run


def made_logits(filters: Filters) -> np.ndarray:
    draw = np.random.default_rng(7)
    logits = draw.normal(scale=1.5, size=V).astype(np.float32)
    logits[draw.permutation(V)[: filters.banned]] = -np.inf
    return logits


def distribution(logits: np.ndarray, filters: Filters) -> np.ndarray:
    """The exact probabilities: min-p, then top-k, then top-p of what is left, then renormalized."""
    x = logits.astype(np.float64) / filters.temperature
    p = np.exp(x - x.max())
    p[p < filters.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if filters.top_k:
        p[order[filters.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= filters.top_p]] = 0
    return p / p.sum()


def arguments(logits: np.ndarray, filters: Filters, seed: torch.Tensor, draw: torch.Tensor) -> dict[str, torch.Tensor]:
    S = len(seed)
    return {
        "logits_SV": torch.from_numpy(logits).expand(S, -1).contiguous(),
        "temperature_S": torch.full((S,), filters.temperature),
        "top_k_S": torch.full((S,), filters.top_k, dtype=torch.int32),
        "top_p_S": torch.full((S,), filters.top_p),
        "min_p_S": torch.full((S,), filters.min_p),
        "seed_S": seed,
        "sample_index_S": draw.to(torch.int32),
    }


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-squared test; tokens expected fewer than 10 times share one bin."""
    counts, mean = np.bincount(tokens, minlength=len(expected)), expected * len(tokens)
    rare = mean < 10
    bins = [*zip(counts[~rare], mean[~rare], strict=True)]
    if mean[rare].sum() > 0:
        bins.append((counts[rare].sum(), mean[rare].sum()))
    statistic = sum((n - m) ** 2 / m for n, m in bins)
    halves = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
