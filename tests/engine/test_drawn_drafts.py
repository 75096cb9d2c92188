"""Drafts that a draft model draws, through the engine: the text has the model's own distribution, worked out in float64
from transformers' logits, and a draft is right with probability 1 minus the distance of the two models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import finish, request
from test_draft_models import LEN, METHODS, Known, Method, V, _open, made_model
from torch import Tensor
from transformers import LlamaForCausalLM

from graphllm.config.sampling import SamplingParams

PROMPT, TEMPERATURE, TOP_K = [5, 17, 40, 2, 80, 33], 5.0, 30
LEAST_P, SIGMAS = 1e-4, 4.0


@pytest.fixture(scope="module")
def random_llama() -> LlamaForCausalLM:
    return made_model()


def _probs(logits: Tensor, top_k: int = 0) -> Tensor:
    x = logits.double()
    if top_k:
        x = x.masked_fill(x < x.topk(top_k).values[..., -1:], -math.inf)
    return torch.softmax(x / TEMPERATURE, -1)


def _likely(tokens: np.ndarray, expected: np.ndarray) -> bool:
    """By chi-squared; tokens expected fewer than 10 times share one bin."""
    counts, mean = np.bincount(tokens, minlength=len(expected)), expected * len(tokens)
    assert not counts[mean < 1e-9 * len(tokens)].any()
    rare = mean < 10
    seen, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(mean[~rare], mean[rare].sum())
    statistic = float(((seen - wanted) ** 2 / wanted)[wanted > 0].sum())
    free = np.count_nonzero(wanted) - 1
    return float(torch.special.gammaincc(torch.tensor(free / 2.0), torch.tensor(statistic / 2))) > LEAST_P


class Expected(NamedTuple):
    """The distributions of the first three tokens, and how often the first draft, which is for the second token, is
    right; 0 where no reference draws it."""

    tokens: list[np.ndarray]
    right: float


@torch.no_grad()
def _expected(model: LlamaForCausalLM, method: Method, top_k: int) -> Expected:
    states = model.model(torch.tensor([[*PROMPT, t] for t in range(V)]), output_hidden_states=True).hidden_states
    first = _probs(model(torch.tensor([PROMPT])).logits[0, -1], top_k)
    second = _probs(model.lm_head(states[-1][:, -1]), top_k)  # by the first token
    two = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    given = torch.cat([torch.tensor(PROMPT).expand(len(two), -1), two], 1)
    third = _probs(torch.cat([model(part).logits[:, -1] for part in given.split(1024)]), top_k).view(V, V, V)
    pair = first[:, None] * second
    right = 0.0
    if method.first is not None:
        for token in range(V):
            known = Known([*PROMPT, token], states[-1][token, :-1], [s[token, :-1] for s in states])
            q = _probs(method.first(model, known))
            right += float(first[token] * torch.minimum(second[token], q).sum())
    return Expected([t.numpy() for t in (first, pair.sum(0), torch.einsum("ab,abc->c", pair, third))], right)


def _check(
    model: LlamaForCausalLM, method: Method, place: Path, count: int, ways: Iterable[tuple[int, int]], **fields: Any
) -> None:
    """ways: tokens of a request and its top_k. Of two tokens all drafts that are verified are behind the first one."""
    wide = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "draft_sample_method": "probabilistic"}
    core = _open(model, method, place, **wide, **fields).core
    core._scheduler.acceptance.best = lambda n, lengths, share=1.0: lengths[-1]  # type: ignore[method-assign]
    for length, top_k in ways:
        expected, before = _expected(model, method, top_k), core.stats()
        params = SamplingParams(temperature=TEMPERATURE, top_k=top_k, max_tokens=length, ignore_eos=True)
        wanted = [request(str(i), PROMPT, params, seed=1_000_000 * length + i) for i in range(count)]
        found = finish(core, wanted)
        tokens = np.array([found[r.id].tokens for r in wanted])
        assert [_likely(tokens[:, i], expected.tokens[i]) for i in range(length)] == [True] * length, (length, top_k)
        after, right = core.stats(), expected.right
        drafts = after.drafts - before.drafts
        assert drafts > 0.9 * count
        if right and length == 2:
            seen = (after.accepted_tokens[0] - before.accepted_tokens[0]) / drafts
            print(f"{method.name}, top_k {top_k}: {seen:.4f} of {drafts} drafts are right, 1 - TV is {right:.4f}")
            assert 0.15 < right < 0.95
            assert abs(seen - right) < SIGMAS * math.sqrt(right * (1 - right) / drafts)
    # Greedy requests beside them give the likeliest tokens, whatever is drafted.
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answer = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    hot = SamplingParams(temperature=TEMPERATURE, max_tokens=LEN // 2, ignore_eos=True)
    mixed = [request(str(i), PROMPT, hot if i % 2 else greedy, seed=i) for i in range(6)]
    found = finish(core, mixed)
    assert [found[str(i)].tokens for i in (0, 2, 4)] == [answer] * 3
    core.close()


@pytest.mark.parametrize("name", ["draft_model", "eagle", "eagle3", "medusa"])
def test_the_text_is_the_models(random_llama: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    _check(random_llama, METHODS[name](random_llama), tmp_path, 300, ((2, 0), (3, TOP_K)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle"])
def test_twenty_thousand_draws_compiled(random_llama: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    ways = ((2, 0), (2, TOP_K), (3, 0), (3, TOP_K))
    _check(random_llama, METHODS[name](random_llama), tmp_path, 20_000, ways, backend="inductor")
