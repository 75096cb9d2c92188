"""Drafts that a draft model draws, through the engine: each token has the model's own distribution behind the text
before it, worked out in float64 from transformers' logits, and a draft is right with probability 1 minus the distance
of the two models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from tests.engine.drafts.test_draft_models import METHODS, Known, Method, V, _open, made_model
from tests.engine.harness import finish, request, verify_all_drafts

PROMPT, TEMPERATURE, TOP_K, LENGTH = [5, 17, 40, 2, 80, 33], 5.0, 30, 24
LEAST_P, SIGMAS, BINS = 1e-4, 4.0, 20


@pytest.fixture(scope="module")
def random_llama() -> LlamaForCausalLM:
    return made_model()


def _probs(logits: Tensor, top_k: int = 0) -> Tensor:
    x = logits.double()
    if top_k:
        x = x.masked_fill(x < x.topk(top_k).values[..., -1:], -math.inf)
    return torch.softmax(x / TEMPERATURE, -1)


def _asked(temperature: float, top_k: int, count: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, max_tokens=count, ignore_eos=True)


@torch.no_grad()
def _below(model: LlamaForCausalLM, texts: Tensor, top_k: int) -> np.ndarray:
    """Of each token the probability of likelier ones in its place, and of a part of its own: uniform in (0, 1) and
    independent if the tokens are draws from the model. Where drafts are wrongly accepted or replaced, likely tokens are
    too many or too few."""
    behind = texts[:, len(PROMPT) :, None]
    rows = [model(part).logits[:, len(PROMPT) - 1 : -1] for part in texts.split(512)]
    p = _probs(torch.cat(rows), top_k)
    own = p.gather(2, behind)
    assert (own > 0).all()
    likelier = torch.where(p > own, p, 0.0).sum(-1, keepdim=True)
    part = torch.rand(own.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (likelier + part * own).flatten().numpy()


def _check_text(core: EngineCore, model: LlamaForCausalLM, count: int) -> None:
    """Requests with and without a filter, and greedy ones, beside each other."""
    greedy = _asked(0.0, 0, LENGTH)
    wanted = [request(str(i), PROMPT, _asked(TEMPERATURE, TOP_K * (i % 2), LENGTH), seed=i) for i in range(count)]
    found = finish(core, [*wanted, *(request(f"greedy {i}", PROMPT, greedy) for i in range(3))])
    answer = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    assert [found[f"greedy {i}"].tokens for i in range(3)] == [answer] * 3
    texts = torch.tensor([[*PROMPT, *found[r.id].tokens] for r in wanted])
    for i, top_k in enumerate((0, TOP_K)):
        seen, _ = np.histogram(_below(model, texts[i::2], top_k), BINS, (0.0, 1.0))
        mean = seen.sum() / BINS
        statistic = torch.tensor(float(((seen - mean) ** 2 / mean).sum()) / 2)
        assert torch.special.gammaincc(torch.tensor((BINS - 1) / 2), statistic) > LEAST_P, seen


def _check_acceptance(core: EngineCore, model: LlamaForCausalLM, method: Method, top_k: int, count: int) -> None:
    """Requests of two tokens: all drafts that are verified are behind the first one."""
    before = core.stats()
    finish(core, [request(str(i), PROMPT, _asked(TEMPERATURE, top_k, 2), seed=10**6 + i) for i in range(count)])
    after = core.stats()
    drafts = after.drafts - before.drafts
    seen = (after.accepted_tokens[0] - before.accepted_tokens[0]) / drafts
    with torch.no_grad():
        texts = torch.tensor([[*PROMPT, t] for t in range(V)])
        states = model.model(texts, output_hidden_states=True).hidden_states
        first = _probs(model(torch.tensor([PROMPT])).logits[0, -1], top_k)
        second = _probs(model.lm_head(states[-1][:, -1]), top_k)  # by the first token
        right = 0.0
        for token in range(V):
            known = Known([*PROMPT, token], states[-1][token, :-1], [s[token, :-1] for s in states])
            assert method.first is not None
            right += float(first[token] * torch.minimum(second[token], _probs(method.first(model, known))).sum())
    print(f"{method.name}, top_k {top_k}: {seen:.4f} of {drafts} drafts are right, 1 - TV is {right:.4f}")
    assert drafts > 0.9 * count
    assert 0.15 < right < 0.95
    assert abs(seen - right) < SIGMAS * math.sqrt(right * (1 - right) / drafts)


def _opened(model: LlamaForCausalLM, method: Method, place: Path, **fields: Any) -> EngineCore:
    wide = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "draft_sample_method": "probabilistic"}
    core = _open(model, method, place, pages=200, **wide, **fields).core
    verify_all_drafts(core)
    return core


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["draft_model", "eagle3", "medusa", pytest.param("eagle", marks=pytest.mark.slow)])
def test_the_text_is_the_models(random_llama: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    method = METHODS[name](random_llama)
    core = _opened(random_llama, method, tmp_path)
    _check_text(core, random_llama, 120)
    if method.first is not None:
        _check_acceptance(core, random_llama, method, 0, 250)
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle"])
def test_twenty_thousand_draws_compiled(random_llama: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    method = METHODS[name](random_llama)
    core = _opened(random_llama, method, tmp_path, backend="inductor")
    _check_text(core, random_llama, 2_000)  # of 24 tokens
    for top_k in (0, TOP_K):
        _check_acceptance(core, random_llama, method, top_k, 20_000)
    core.close()
