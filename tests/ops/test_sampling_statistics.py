"""What `sample` draws has the distribution it should: chi-squared against probabilities worked out in float64.

Seeds are fixed, so these tests either always pass or always fail; a right sampler fails one draw of seeds in 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphllm.ops.sampling.sample import sample
from tests.ops.implementations import implementation
from tests.ops.sampling_statistics import (
    COMBINATIONS,
    DRAWS,
    LEAST_P,
    Filters,
    arguments,
    distribution,
    made_logits,
    on_gpu,
    p_value,
)

Sampler = Callable[..., torch.Tensor]
triton_sample = implementation(sample, "triton_sample")
SAMPLERS: dict[str, Sampler] = {"reference": sample.reference, "cpu": implementation(sample, "cpu")}
if torch.cuda.is_available():  # the interpreter takes hours
    SAMPLERS["triton"] = on_gpu(triton_sample)


def _draws(sampler: Sampler, filters: Filters, count: int) -> np.ndarray:
    """Half of the draws by seeds that differ, half by the draws of one seed."""
    logits, half = made_logits(filters), count // 2
    by_seed = arguments(logits, filters, torch.arange(half), torch.zeros(half))
    by_draw = arguments(logits, filters, torch.full((half,), -123456789012345), torch.arange(half))
    return torch.cat([sampler(**by_seed), sampler(**by_draw)]).numpy()


def _check(sampler: Sampler, filters: Filters, count: int) -> None:
    tokens = _draws(sampler, filters, count)
    expected = distribution(made_logits(filters), filters)
    assert (expected > 0).sum() > 3
    assert not set(tokens) - set(np.flatnonzero(expected))
    assert p_value(tokens, expected) > LEAST_P
    assert p_value(tokens[: count // 2], expected) > LEAST_P
    assert p_value(tokens[count // 2 :], expected) > LEAST_P


def test_the_test_can_tell() -> None:
    """The tail of chi-squared is right, and a distribution a few percent off is found out."""
    uniform = np.full(3, 1 / 3)
    tokens = np.repeat([0, 1, 2], [1040, 1000, 960])  # 2 degrees of freedom, statistic 3.2: the tail is exp(-1.6)
    assert p_value(tokens, uniform) == pytest.approx(math.exp(-1.6))
    tokens = _draws(sample.reference, Filters(), DRAWS)
    assert p_value(tokens, distribution(made_logits(Filters()), Filters(temperature=1.05))) < LEAST_P
    tokens = _draws(sample.reference, Filters(top_k=7), DRAWS)
    assert p_value(tokens, distribution(made_logits(Filters()), Filters(top_k=8))) < LEAST_P


@pytest.mark.parametrize("filters", COMBINATIONS, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def testdistribution(sampler: str, filters: Filters) -> None:
    _check(SAMPLERS[sampler], filters, DRAWS)


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU draws as often as the others")
def test_distribution_of_the_triton_kernel() -> None:
    """A few draws only, for the interpreter; the op's cases compare the filters with the reference, exactly."""
    _check(triton_sample, Filters(), 200)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_does_not_depend_on_the_others(sampler: str) -> None:
    """A (seed, draw) pair gives the same token by itself and anywhere in a batch of rows with other parameters."""
    shuffle = torch.Generator().manual_seed(3)
    rows = [(f, seed) for f in COMBINATIONS for seed in (0, 5, -9, 2**62)]
    columns = [
        arguments(made_logits(f), f, torch.tensor([seed]), torch.tensor([i])) for i, (f, seed) in enumerate(rows)
    ]
    single = torch.cat([SAMPLERS[sampler](**c) for c in columns])
    assert len(set(single.tolist())) > 5
    for _ in range(3):
        order = torch.randperm(len(rows), generator=shuffle)
        batch = {name: torch.cat([columns[i][name] for i in order]) for name in columns[0]}
        assert torch.equal(SAMPLERS[sampler](**batch), single[order])
