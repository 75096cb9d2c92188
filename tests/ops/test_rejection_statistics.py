"""What `rejection_sample` gives has the target's distribution whatever drafts there were, and a draft is given as often
as can be: with probability 1 minus the distance of the two distributions. Against float64, by chi-squared."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphllm.ops.sampling.process_logits import process_logits
from graphllm.ops.sampling.sample import sample
from graphllm.ops.speculation.accept_drafts import accept_drafts
from graphllm.ops.speculation.rejection_sample import draft_seed, rejection_sample
from tests.ops.implementations import implementation
from tests.ops.sampling_statistics import (
    COMBINATIONS,
    DRAWS,
    LEAST_P,
    Filters,
    V,
    arguments,
    distribution,
    made_logits,
    on_gpu,
    p_value,
)

Sampler = Callable[..., torch.Tensor]
cpu_sample, cpu_rejection_sample = implementation(sample, "cpu"), implementation(rejection_sample, "cpu")
triton_rejection_sample = implementation(rejection_sample, "triton_rejection_sample")
SAMPLERS: dict[str, Sampler] = {"reference": rejection_sample.reference, "cpu": cpu_rejection_sample}
if torch.cuda.is_available():  # the interpreter takes an hour for a case
    SAMPLERS["triton"] = on_gpu(triton_rejection_sample)
ADJUSTERS: dict[str, Sampler] = {
    "reference": process_logits.reference,
    "cpu": implementation(process_logits, "cpu"),
    "triton": on_gpu(implementation(process_logits, "triton_process_logits")),
}


def _renamed(args: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n.replace("_SV", "_RV").replace("_S", "_R"): t for n, t in args.items()}


def _drawn(
    sampler: Sampler, p_logits: np.ndarray, q: np.ndarray, filters: Filters, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts from q, and what becomes of them: half by seeds that differ, half by the draws of one seed."""
    half, drafts, tokens = count // 2, [], []
    for seed, index in (
        (torch.arange(half), torch.zeros(half)),
        (torch.full((half,), -987654321), torch.arange(half)),
    ):
        args = arguments(p_logits, filters, seed, index)
        own = arguments(np.log(q).astype(np.float32), Filters(), draft_seed(seed), index)
        drafts.append(cpu_sample(**own))
        zeros = torch.zeros(half, dtype=torch.int32)
        probs = torch.from_numpy(q.astype(np.float32))[None, None]
        tokens.append(sampler(**_renamed(args), drafts_R=drafts[-1], slots_R=zeros, place_R=zeros,
                              draft_probs_NKV=probs))  # fmt: skip
    return torch.cat(drafts).numpy(), torch.cat(tokens).numpy()


def _other(seed: int, spread: float) -> np.ndarray:
    """A draft model's distribution, some way off the target's."""
    noise = np.random.default_rng(seed).normal(scale=spread, size=V)
    x = made_logits(Filters()).astype(np.float64) + noise
    q = np.exp(x - x.max())
    return q / q.sum()


def _check(sampler: str, logits: np.ndarray, p: np.ndarray, q: np.ndarray, filters: Filters, count: int) -> None:
    drafts, tokens = _drawn(SAMPLERS[sampler], logits, q, filters, count)
    assert not set(tokens) - set(np.flatnonzero(p))
    assert p_value(tokens, p) > LEAST_P
    rate = float(np.minimum(p, q).sum())
    sigma = math.sqrt(rate * (1 - rate) / count)
    assert abs(float((tokens == drafts).mean()) - rate) < 4 * sigma + 1e-9


@pytest.mark.parametrize("filters", COMBINATIONS, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_distribution_is_the_targets(sampler: str, filters: Filters) -> None:
    logits = made_logits(filters)
    _check(sampler, logits, distribution(logits, filters), _other(11, 0.8), filters, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("filters", COMBINATIONS, ids=str)
def test_the_triton_kernel_draws_what_the_reference_draws(filters: Filters) -> None:
    """Drawn row for row, so with its distribution; few rows, for the interpreter."""
    logits, q = made_logits(filters), _other(11, 0.8)
    drafts, tokens = _drawn(on_gpu(triton_rejection_sample), logits, q, filters, 240)
    assert (tokens == _drawn(rejection_sample.reference, logits, q, filters, 240)[1]).all()
    assert 0 < (drafts == tokens).mean() < 1


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("spread", [0.0, 0.1, 4.0])
def test_drafts_near_and_far(sampler: str, spread: float) -> None:
    logits = made_logits(Filters())
    _check(sampler, logits, distribution(logits, Filters()), _other(5, spread), Filters(), DRAWS)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("adjuster", ADJUSTERS)
@pytest.mark.parametrize("place", [0, 3])
def test_penalties_of_drafts(place: int, adjuster: str, sampler: str) -> None:
    """The row after three drafts is penalized for them; then the distribution is as in plain decoding there."""
    logits, filters = made_logits(Filters()), Filters(0.9, top_k=30, top_p=0.95)
    before, counts = [7, 7, 12], np.zeros(V, dtype=np.int64)
    counts[[3, 7]] = [2, 1]
    with_drafts = counts.copy()
    np.add.at(with_drafts, before[:place], 1)
    x = logits.astype(np.float64)
    x = np.where(with_drafts > 0, np.where(x > 0, x / 1.3, x * 1.3), x) - 0.2 * with_drafts - 0.4 * (with_drafts > 0)
    exact = distribution(x, filters)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    adjusted = ADJUSTERS[adjuster](
        torch.from_numpy(logits)[None], ints(0), ints(-1), torch.zeros((1, -(-V // 32)), dtype=torch.int32),
        ints(0), torch.tensor([1.3]), torch.tensor([0.2]), torch.tensor([0.4]),
        torch.from_numpy(counts)[None].int(), torch.zeros((1, 0), dtype=torch.int32), torch.zeros((1, 0)),
        ints(-1, *before), ints(place), ints(place),
    )  # fmt: skip
    _check(sampler, adjusted[0].numpy(), exact, _other(3, 0.7), filters, DRAWS)


def test_two_tokens_of_a_chain() -> None:
    """Through acceptance as well: pairs of tokens of a chain in which each depends on the one before have the target's
    joint distribution, though both were drafted by another chain."""
    n, size, rng = DRAWS, 6, np.random.default_rng(2)
    target, other = (rng.normal(size=(size, size)) for _ in range(2))
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (target, other))
    seed, index = torch.arange(n), torch.zeros(n, dtype=torch.int32)

    def rows(logits: np.ndarray, seed: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        flat = {"temperature": torch.ones(n), "top_k": torch.zeros(n, dtype=torch.int32), "top_p": torch.ones(n),
                "min_p": torch.zeros(n), "seed": seed, "sample_index": index}  # fmt: skip
        return {"logits_SV": torch.from_numpy(logits.astype(np.float32)), **{f"{k}_S": v for k, v in flat.items()}}

    first = cpu_sample(**rows(np.log(q[np.zeros(n, dtype=int)]), draft_seed(seed), index)).numpy()
    second = cpu_sample(**rows(np.log(q[first]), draft_seed(seed), index + 1)).numpy()
    drafts = np.stack([first, second, np.full(n, -1)], axis=1)
    logits = np.stack([target[np.zeros(n, dtype=int)], target[first], target[second]], axis=1).reshape(3 * n, size)
    probs = np.stack([q[np.zeros(n, dtype=int)], q[first]], axis=1).astype(np.float32)
    each = {
        k.replace("_S", "_R"): v.repeat_interleave(3) for k, v in rows(target, seed, index).items() if k != "logits_SV"
    }
    each["sample_index_R"] = torch.arange(3).repeat(n).int()
    slots, place = torch.arange(n).repeat_interleave(3).int(), torch.arange(3).repeat(n).int()
    tokens = cpu_rejection_sample(
        torch.from_numpy(logits.astype(np.float32)), **each, drafts_R=torch.from_numpy(drafts.reshape(-1)).int(),
        slots_R=slots, place_R=place, draft_probs_NKV=torch.from_numpy(probs),
    )  # fmt: skip
    starts = torch.arange(0, 3 * n + 1, 3).int()
    fed = np.concatenate([np.zeros((n, 1), dtype=int), drafts[:, :2]], axis=1).reshape(-1)
    states = torch.zeros(n + 1, dtype=torch.int32), torch.zeros(n + 1, dtype=torch.int32)
    *_, kept, drafted = accept_drafts.reference(
        tokens, torch.arange(3 * n).int(), slots, torch.from_numpy(fed).int(), slots, starts, starts,
        torch.arange(n).int(), *states, 3,
    )  # fmt: skip
    assert (drafted == 2).all()
    got = tokens.numpy().reshape(n, 3)
    again = cpu_sample(**rows(target[got[:, 0]], seed, index + 1)).numpy()  # the next step's, where one was kept
    pair = got[:, 0] * size + np.where(kept.numpy() > 1, got[:, 1], again)
    exact = (p[0][:, None] * p).reshape(-1)
    assert p_value(pair, exact) > LEAST_P
    assert float((kept == 3).float().mean()) > 0.2


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_does_not_depend_on_the_others(sampler: str) -> None:
    """A row gives the same token by itself and in a batch; without a draft, what `sample` gives."""
    n = 40
    filters = COMBINATIONS[6]
    q = torch.from_numpy(np.stack([_other(s, 1.0) for s in range(4)]).astype(np.float32))[:, None]
    args = _renamed(arguments(made_logits(filters), filters, torch.arange(n) * 77, torch.arange(n)))
    args["logits_RV"] = args["logits_RV"] + torch.randn(n, V, generator=torch.Generator().manual_seed(3))
    drafts = torch.arange(n).int() % 9 - 1
    slots, zeros = torch.arange(n).int() % 4, torch.zeros(n, dtype=torch.int32)
    run = SAMPLERS[sampler]
    tokens = run(**args, drafts_R=drafts, slots_R=slots, place_R=zeros, draft_probs_NKV=q)
    for r in range(n):
        one = {k: v[r : r + 1] for k, v in args.items()}
        single = run(**one, drafts_R=drafts[r : r + 1], slots_R=slots[r : r + 1], place_R=zeros[:1], draft_probs_NKV=q)
        assert single[0] == tokens[r]
    none = drafts < 0
    plain = sample.reference(**{k.replace("_RV", "_SV").replace("_R", "_S"): v for k, v in args.items()})
    assert none.any()
    assert torch.equal(tokens[none], plain[none])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_typical_acceptance(sampler: str) -> None:
    """Drafts are accepted by the rule, worked out in float64, and by nothing else; greedy rows stay as they are."""
    logits, p = made_logits(Filters()), distribution(made_logits(Filters()), Filters())
    entropy = -(p * np.log(p)).sum()
    least = min(0.09, 0.3 * math.exp(-entropy))
    n = V * 50
    args = _renamed(arguments(logits, Filters(), torch.arange(n), torch.zeros(n)))
    drafts = torch.arange(n).int() % V
    more = {"drafts_R": drafts, "slots_R": drafts * 0, "place_R": drafts * 0, "typical_threshold": 0.09,
            "typical_alpha": 0.3}  # fmt: skip
    tokens = SAMPLERS[sampler](**args, **more).numpy()
    typical = p[drafts.numpy()] >= least
    assert 0 < typical.mean() < 1
    assert (tokens == drafts.numpy())[typical].all()
    assert p_value(tokens[~typical], p) > LEAST_P
    greedy = {**args, "temperature_R": torch.zeros(n)}
    assert (SAMPLERS[sampler](**greedy, **more).numpy() == logits.argmax()).all()
