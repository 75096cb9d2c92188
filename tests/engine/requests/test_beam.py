"""Beam search over a toy model, against a search of its own with numpy and against looking at every sequence."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import BeamSearchParams
from graphllm.engine.requests.beam import BeamSearch, BeamSearchSequence
from graphllm.engine.requests.outputs import Logprob
from graphllm.engine.requests.request import EngineCoreOutput
from graphllm.entrypoints.llm import LLM
from tests.engine.byte_tokenizer import EOS, make
from tests.engine.stub_core import StubCore, info, log_softmax

Found = list[tuple[list[int], float]]


def table(vocab: int, seed: int) -> np.ndarray:
    """Log-probabilities [V, V, V] of the next token by the last two."""
    return log_softmax(np.random.default_rng(seed).normal(scale=1.5, size=(vocab, vocab, vocab)))


class Ends:
    """As much of a tokenizer as a search without text needs."""

    def __init__(self, *stop_ids: int) -> None:
        self.stop_ids = frozenset(stop_ids)
        self.token_bytes = [b"%d" % i for i in range(100)]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def search(
    logprobs: np.ndarray, prompt: list[int], p: BeamSearchParams, eos: frozenset[int], most: int
) -> list[BeamSearchSequence]:
    """`BeamSearch` fed with the 2 * width likeliest tokens straight from the table."""
    beams = BeamSearch(prompt, p, eos, most)
    while wanted := beams.prompts():
        rows = [_row(logprobs, tokens) for tokens in wanted]
        best = [np.argsort(-row)[: 2 * p.beam_width] for row in rows]
        beams.advance([{int(t): Logprob(float(row[t])) for t in order} for row, order in zip(rows, best, strict=True)])
    return beams.best()


def _row(logprobs: np.ndarray, tokens: list[int]) -> np.ndarray:
    return logprobs[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]


def by_arrays(logprobs: np.ndarray, prompt: list[int], p: BeamSearchParams, eos: frozenset[int]) -> Found:
    """Beam search over whole score matrices: every step scores all extensions [beams, V] and sorts them flat."""
    V, width = logprobs.shape[0], p.beam_width
    beams, scores = np.array([prompt]), np.zeros(1)
    done: Found = []
    for _ in range(p.max_tokens):
        before = beams[:, -2] if beams.shape[1] > 1 else np.zeros(len(beams), int)
        total = scores[:, None] + logprobs[before, beams[:, -1]]
        kept = np.argsort(np.argsort(-logprobs[before, beams[:, -1]], axis=1), axis=1) < 2 * width
        total = np.where(kept, total, -np.inf)
        ends = np.isin(np.arange(V), list(eos)) & (not p.ignore_eos)
        for beam, token in np.argwhere(np.isfinite(total) & ends):
            done.append(([*beams[beam].tolist(), int(token)], float(total[beam, token])))
        total[:, ends] = -np.inf
        length = beams.shape[1] + 1 - np.isin(np.arange(V), list(eos))
        order = np.argsort(-(total / length**p.length_penalty), axis=None, kind="stable")[:width]
        order = order[np.isfinite(total.reshape(-1)[order])]
        beams = np.column_stack([beams[order // V], order % V])
        scores = total.reshape(-1)[order]
    done += [(b.tolist(), float(s)) for b, s in zip(beams, scores, strict=True)]
    return sorted(done, key=lambda d: -d[1] / (len(d[0]) - (d[0][-1] in eos)) ** p.length_penalty)[:width]


def by_looking_at_all(logprobs: np.ndarray, prompt: list[int], p: BeamSearchParams, eos: frozenset[int]) -> Found:
    """Every sequence that ends with an end token, or has max_tokens without one."""
    V, found = logprobs.shape[0], []
    for n in range(1, p.max_tokens + 1):
        for more in itertools.product(range(V), repeat=n):
            inner = more[:-1]
            if any(t in eos for t in inner) or not (more[-1] in eos or n == p.max_tokens):
                continue
            tokens, total = list(prompt), 0.0
            for token in more:
                total += float(_row(logprobs, tokens)[token])
                tokens.append(token)
            found.append((tokens, total))
    return sorted(found, key=lambda d: -d[1] / (len(d[0]) - (d[0][-1] in eos)) ** p.length_penalty)


def same(ours: list[BeamSearchSequence], theirs: Found) -> None:
    assert [s.tokens for s in ours] == [tokens for tokens, _ in theirs]
    assert [s.cum_logprob for s in ours] == pytest.approx([score for _, score in theirs])


@pytest.mark.parametrize("seed", range(20))
def test_against_arrays(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    logprobs = table(12, seed)
    p = BeamSearchParams(
        beam_width=int(rng.integers(1, 6)),
        max_tokens=int(rng.integers(1, 9)),
        ignore_eos=seed % 4 == 0,
        length_penalty=float(rng.choice([0.0, 0.6, 1.0, 2.0])),
    )
    eos = frozenset(rng.choice(12, int(rng.integers(0, 3)), replace=False).tolist())
    prompt = rng.integers(0, 12, int(rng.integers(1, 4))).tolist()
    same(search(logprobs, prompt, p, eos, 1000), by_arrays(logprobs, prompt, p, eos))


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_that_is_wide_enough_finds_the_best(seed: int) -> None:
    logprobs, eos = table(4, seed), frozenset([3])
    p = BeamSearchParams(beam_width=128, max_tokens=4, length_penalty=0.8)
    everything = by_looking_at_all(logprobs, [1, 2], p, eos)
    found = search(logprobs, [1, 2], p, eos, 1000)
    # Sequences of the same triples of tokens score the same, so their order is left open.
    assert len(everything) == len(found) == 3**4 + 1 + 3 + 9 + 27
    assert {tuple(s.tokens): pytest.approx(s.cum_logprob) for s in found} == {tuple(t): s for t, s in everything}
    assert found[0].cum_logprob == pytest.approx(everything[0][1])
    one = BeamSearchParams(beam_width=1, max_tokens=4)
    assert search(logprobs, [1, 2], one, eos, 1000)[0].cum_logprob <= everything[0][1] + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_through_an_engine(seed: int) -> None:
    logprobs, eos = table(12, seed), frozenset([3])
    core = StubCore(info(12), logprobs)
    llm = LLM.from_core(core, Ends(*eos))  # type: ignore[arg-type]
    p = BeamSearchParams(beam_width=3, max_tokens=5)
    prompts = [[1, 2], [5], [7, 8, 9]]
    outputs = llm.beam_search(prompts, p)
    for prompt, output in zip(prompts, outputs, strict=True):
        same(output.sequences, by_arrays(logprobs, prompt, p, eos))
        for s in output.sequences:
            ended = s.tokens[-1] in eos
            assert s.finish_reason == ("stop" if ended else "length")
            assert s.text == " ".join(map(str, s.tokens[: -1 if ended else None]))
            assert s.prompt_tokens == len(prompt)
            chosen = [position[t].logprob for position, t in zip(s.logprobs, s.tokens[len(prompt) :], strict=True)]
            assert sum(chosen) == pytest.approx(s.cum_logprob)
            assert all(len(position) == 6 for position in s.logprobs)
    assert len(core.added) <= 3 * (1 + 4 * 3)
    assert all((r.limit, r.params.logprobs, r.params.temperature) == (1, 6, 0.0) for r in core.added)
    assert core.unfinished == 0


def test_text_with_the_end_token(tmp_path: Path) -> None:
    logits = np.full((320, 320, 320), 0.0, dtype=np.float16)
    tokenizer = make(tmp_path)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    logits[:, :, a], logits[:, a, EOS] = 5, 9
    llm = LLM.from_core(StubCore(info(320), logits), tokenizer)
    for include, text in ((False, "a"), (True, "a</s>")):
        p = BeamSearchParams(2, 4, include_stop_str_in_output=include)
        (output,) = llm.beam_search("a", p)
        best = output.sequences[0]
        assert (best.tokens, best.text, best.finish_reason) == ([a, EOS], text, "stop")
        assert len(output.sequences) == 2


def test_the_end_of_the_context() -> None:
    logprobs = table(5, 0)
    llm = LLM.from_core(StubCore(info(5, max_model_len=6), logprobs), None)
    p = BeamSearchParams(beam_width=2, max_tokens=50)
    (output,) = llm.beam_search([1, 2, 3], p)
    assert [len(s.tokens) for s in output.sequences] == [6, 6]
    assert [s.text for s in output.sequences] == [None, None]
    same(output.sequences, by_arrays(logprobs, [1, 2, 3], BeamSearchParams(2, 3), frozenset()))


def test_mistakes() -> None:
    core = StubCore(info(12), table(12, 0))
    llm = LLM.from_core(core, None)
    with pytest.raises(ConfigError, match=r"beam_width is 11: it needs 22 log-probabilities .* 20; give at most 10"):
        llm.beam_search([1], BeamSearchParams(11, 2))
    with pytest.raises(ConfigError, match=r"^prompts\[1\]: prompt has token id 12"):
        llm.beam_search([[1], [12]], BeamSearchParams(2, 2))
    assert core.added == []


def test_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    core = StubCore(info(12), table(12, 0))

    def failing(request: Any, output: list[int]) -> EngineCoreOutput:
        del core.running[request.id]
        return EngineCoreOutput(request.id, [], "error", error="logits are NaN")

    monkeypatch.setattr(core, "advance", failing)
    with pytest.raises(RuntimeError, match="a step ended with error: logits are NaN"):
        LLM.from_core(core, None).beam_search([1], BeamSearchParams(2, 2))


def test_sampled_tokens_are_candidates_too() -> None:
    """As in vLLM: with a temperature the token that was sampled may stand beside the likeliest ones."""
    beams = BeamSearch([1], BeamSearchParams(1, 1, temperature=1.0), frozenset(), 10)
    beams.advance([{7: Logprob(-0.1), 3: Logprob(-0.5), 4: Logprob(-1.0)}])
    assert [s.tokens for s in beams.best()] == [[1, 7]]
