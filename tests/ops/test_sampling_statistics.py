"""What `sample` draws has the distribution it should: chi-squared against probabilities worked out in float64.

Seeds are fixed, so these tests either always pass or always fail; a right sampler fails one draw of seeds in 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from graphllm.ops.sample import sample
from graphllm.ops.sample.cpu import cpu_sample
from graphllm.ops.sample.triton_sample import triton_sample

Sampler = Callable[..., torch.Tensor]
SAMPLERS: dict[str, Sampler] = {"reference": sample.reference, "cpu": cpu_sample}
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


def _logits(filters: Filters) -> np.ndarray:
    draw = np.random.default_rng(7)
    logits = draw.normal(scale=1.5, size=V).astype(np.float32)
    logits[draw.permutation(V)[: filters.banned]] = -np.inf
    return logits


def _distribution(logits: np.ndarray, filters: Filters) -> np.ndarray:
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


def _args(logits: np.ndarray, filters: Filters, seed: torch.Tensor, draw: torch.Tensor) -> dict[str, torch.Tensor]:
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


def _draws(sampler: Sampler, filters: Filters, count: int) -> np.ndarray:
    """Half of the draws by seeds that differ, half by the draws of one seed."""
    logits, half = _logits(filters), count // 2
    by_seed = _args(logits, filters, torch.arange(half), torch.zeros(half))
    by_draw = _args(logits, filters, torch.full((half,), -123456789012345), torch.arange(half))
    return torch.cat([sampler(**by_seed), sampler(**by_draw)]).numpy()


def _p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-squared test; tokens expected fewer than 10 times share one bin."""
    counts, mean = np.bincount(tokens, minlength=len(expected)), expected * len(tokens)
    rare = mean < 10
    bins = [*zip(counts[~rare], mean[~rare], strict=True)]
    if mean[rare].sum() > 0:
        bins.append((counts[rare].sum(), mean[rare].sum()))
    statistic = sum((n - m) ** 2 / m for n, m in bins)
    halves = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _check(sampler: Sampler, filters: Filters, count: int) -> None:
    tokens = _draws(sampler, filters, count)
    expected = _distribution(_logits(filters), filters)
    assert (expected > 0).sum() > 3
    assert not set(tokens) - set(np.flatnonzero(expected))
    assert _p_value(tokens, expected) > LEAST_P
    assert _p_value(tokens[: count // 2], expected) > LEAST_P
    assert _p_value(tokens[count // 2 :], expected) > LEAST_P


def test_the_test_can_tell() -> None:
    """The tail of chi-squared is right, and a distribution a few percent off is found out."""
    uniform = np.full(3, 1 / 3)
    tokens = np.repeat([0, 1, 2], [1040, 1000, 960])  # 2 degrees of freedom, statistic 3.2: the tail is exp(-1.6)
    assert _p_value(tokens, uniform) == pytest.approx(math.exp(-1.6))
    tokens = _draws(sample.reference, Filters(), DRAWS)
    assert _p_value(tokens, _distribution(_logits(Filters()), Filters(temperature=1.05))) < LEAST_P
    tokens = _draws(sample.reference, Filters(top_k=7), DRAWS)
    assert _p_value(tokens, _distribution(_logits(Filters()), Filters(top_k=8))) < LEAST_P


@pytest.mark.parametrize("filters", COMBINATIONS, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_distribution(sampler: str, filters: Filters) -> None:
    _check(SAMPLERS[sampler], filters, DRAWS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite of a GPU machine compares it with the reference")
def test_distribution_of_the_triton_kernel() -> None:
    """A few draws only, for the interpreter; the op's cases compare the filters with the reference, exactly."""
    _check(triton_sample, Filters(), 200)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_does_not_depend_on_the_others(sampler: str) -> None:
    """A (seed, draw) pair gives the same token alone and anywhere in a batch of rows with other parameters."""
    shuffle = torch.Generator().manual_seed(3)
    rows = [(f, seed) for f in COMBINATIONS for seed in (0, 5, -9, 2**62)]
    columns = [_args(_logits(f), f, torch.tensor([seed]), torch.tensor([i])) for i, (f, seed) in enumerate(rows)]
    alone = torch.cat([SAMPLERS[sampler](**c) for c in columns])
    assert len(set(alone.tolist())) > 5
    for _ in range(3):
        order = torch.randperm(len(rows), generator=shuffle)
        batch = {name: torch.cat([columns[i][name] for i in order]) for name in columns[0]}
        assert torch.equal(SAMPLERS[sampler](**batch), alone[order])
