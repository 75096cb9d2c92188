"""Verification of drafted tokens through the executor: right, half right or wrong, drafts change the number of steps
and nothing else. tests/strange has the same over recurrent states."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from graphllm.config import ConfigError, SpeculationConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.token_tree import token_tree
from graphllm.engine.core import EngineCore
from graphllm.engine.drafts.acceptance import Acceptance
from graphllm.engine.drafts.ngram import NgramProposer
from graphllm.engine.parts.drafts import Drafts
from graphllm.engine.requests.request import EngineRequest, ThinkingBudget
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.batch import SamplingTable
from graphllm.engine.step.constraints import Constraints
from graphllm.engine.structured.source import GrammarError
from graphllm.runtime.memory.staging import StepInput
from tests.artifacts import ON, artifact_of
from tests.engine.harness import GREEDY, Letters, finish, open_core, request
from tests.tiers import thorough

COUNT = 24


def _artifact(folder: Path, device: str = "cpu", **more: Any) -> Path:
    settings = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return artifact_of(folder, **{**settings, "num_speculative_tokens": 3, **ON[device], **more})


def _prompts(vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, vocab) for _ in range(rng.randint(1, 40))] for _ in range(9)]


def _run(
    core: EngineCore, prompts: list[list[int]], expected: list[list[int]], right: float, params: Any = GREEDY
) -> tuple[list[list[int]], list[int]]:
    """What each prompt gets, and the query length of each step. right: how likely a draft is right."""
    rng, lengths, start = random.Random(0), [], core.executor.start

    def record(step: StepInput, program: str) -> Any:
        lengths.append(step.query_len)
        return start(step, program)

    def propose(number: int) -> None:
        for state in core.scheduler.requests.by_slot:
            if state is not None:
                known = len(state.output)
                drafts = [t if rng.random() < right else (t + 1) % 90 for t in expected[int(state.request.id)][known:]]
                core.scheduler.requests.propose(state, drafts[:8])

    core.executor.start = record  # type: ignore[method-assign]
    found = finish(core, [request(str(i), p, params) for i, p in enumerate(prompts)], propose)
    core.executor.start = start  # type: ignore[method-assign]
    return [found[str(i)].tokens for i in range(len(prompts))], lengths


@pytest.fixture(scope="module")
def llama_place(checkpoint: Path, device: str) -> Path:
    return _artifact(checkpoint, device)


@pytest.fixture(scope="module")
def llama(checkpoint: Path, llama_place: Path) -> Iterator[EngineCore]:
    core = open_core(checkpoint, llama_place, pages=100)
    yield core
    core.close()


@pytest.mark.parametrize("right", [1.0, thorough(0.8), 0.0])
def test_drafts_change_nothing_but_the_number_of_steps(llama: EngineCore, checkpoint: Path, right: float) -> None:
    import torch

    model, prompts = LlamaForCausalLM.from_pretrained(checkpoint).eval(), _prompts(311, 1)
    expected = [
        model.generate(
            torch.tensor([p]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(p) :].tolist()
        for p in prompts
    ]  # fmt: skip
    llama.reset_prefix_cache()
    found, lengths = _run(llama, prompts, expected, right)
    assert found == expected
    assert 4 in lengths
    if right == 1.0:
        assert len(lengths) < 0.7 * len(_run(llama, prompts, [[]] * len(prompts), right)[1])


def test_sampled_tokens_are_the_same_with_drafts(llama: EngineCore) -> None:
    """Each row has its own random numbers, so verification keeps what would have been sampled one by one."""
    prompts, params = _prompts(311, 2), SamplingParams(temperature=1.5, seed=7, max_tokens=COUNT, ignore_eos=True)
    alone, lengths = _run(llama, prompts, [[]] * len(prompts), 1.0, params)
    assert max(lengths) == 1
    found, lengths = _run(llama, prompts, alone, 0.8, params)
    assert found == alone
    assert 4 in lengths


@pytest.fixture(scope="module")
def looking(checkpoint: Path, device: str) -> Iterator[tuple[Path, EngineCore]]:
    """A core that drafts what has stood in the text before."""
    place = _artifact(checkpoint, device, prompt_lookup_max=3, max_model_len=128)
    core = open_core(checkpoint, place, pages=100)
    yield place, core
    core.close()


def _most(sequences: int, lengths: list[int], share: float = 1.0, **runs: Sequence[int]) -> int:
    """Verify all that may be."""
    return lengths[-1]


def _repeating(vocab: int, seed: int) -> list[list[int]]:
    """Prompts that say the same several times, some longer than a step, some with the same beginning."""
    rng, found = random.Random(seed), []
    same = [rng.randrange(5, vocab) for _ in range(16)]
    for i in range(8):
        words = [rng.randrange(5, vocab) for _ in range(rng.randint(2, 9))]
        found.append((same if i % 2 else []) + words * rng.randint(1, 6))
    return found


def test_looking_up_changes_nothing_but_the_number_of_steps(
    looking: tuple[Path, EngineCore], llama: EngineCore, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where prompts come in chunks and from the prefix cache, and requests lose their blocks and begin again."""
    import torch

    model, prompts = LlamaForCausalLM.from_pretrained(checkpoint).eval(), _repeating(311, 5)
    expected = [
        model.generate(
            torch.tensor([p]), max_new_tokens=70, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(p) :].tolist()
        for p in prompts
    ]  # fmt: skip
    params = replace(GREEDY, max_tokens=70)
    place, core = looking
    scarce = open_core(checkpoint, place, pages=25)
    for each in (core, core, scarce):  # the second time prompts are in the prefix cache
        monkeypatch.setattr(each.part(Drafts).planner.acceptance, "best", _most)
        before = each.stats()
        found, lengths = _run(each, prompts, [[]] * len(prompts), 1.0, params)
        assert found == expected
        stats = each.stats()
        won = sum(stats.accepted_tokens) - sum(before.accepted_tokens)
        assert won > 40
        assert 4 in lengths
        assert stats.draft_tokens - before.draft_tokens == 3 * (stats.drafts - before.drafts)
        assert stats.accepted_tokens == sorted(stats.accepted_tokens, reverse=True)
    assert scarce.stats().preemptions > 0
    assert core.stats().prefix_hits > 0
    scarce.close()


@pytest.mark.thorough
def test_sampling_is_the_same_with_looking_up(
    looking: tuple[Path, EngineCore], llama: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, core = looking
    monkeypatch.setattr(core.part(Drafts).planner.acceptance, "best", _most)
    prompts = [p[:10] for p in _repeating(311, 6)]
    params = SamplingParams(temperature=0.3, top_k=20, seed=3, max_tokens=60, ignore_eos=True)
    llama.reset_prefix_cache()
    alone, _ = _run(llama, prompts, [[]] * len(prompts), 1.0, params)
    found, lengths = _run(core, prompts, [[]] * len(prompts), 1.0, params)
    assert found == alone
    assert 4 in lengths


def test_drafts_that_there_are_not_do_not_count(
    looking: tuple[Path, EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step verifies, and the metrics have the drafts that the host finds in the same text, no others."""
    core, host = looking[1], NgramProposer(SpeculationConfig(ngram_proposer_max=3))
    monkeypatch.setattr(core.part(Drafts).planner.acceptance, "best", _most)
    steps = drafted = 0
    for i in range(4):
        prompt = random.Random(i).sample(range(5, 311), 12)
        before = core.stats()
        output = finish(core, [request(str(i), prompt, replace(GREEDY, max_tokens=50))])[str(i)].tokens
        after, expected, right, at = core.stats(), 0, 0, 1
        while at < len(output):
            drafts = host.propose(str(i), prompt, output[:at], 3)
            actual = [a == b for a, b in itertools.zip_longest(drafts, output[at : at + 3], fillvalue=-1)]
            kept = (*actual, False).index(False)
            steps, expected, right, at = steps + 1, expected + bool(drafts), right + kept, at + 1 + kept
        assert after.drafts - before.drafts == expected
        assert after.draft_tokens - before.draft_tokens == 3 * expected
        # What was accepted behind the end counts for the engine, which knows no text.
        assert 0 <= sum(after.accepted_tokens) - sum(before.accepted_tokens) - right < 3
        drafted += expected
    assert 0 < drafted < steps


def _stood_before(text: list[int], smallest: int, largest: int) -> int:
    """How many last tokens of a text are the same where the longest run of so many of them stood before, last."""
    for size in range(min(largest, len(text) - 1), smallest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return next((i for i in range(16) if i >= end or text[end - 1 - i] != text[-1 - i]), 16)
    return 0


def test_the_host_knows_on_what_the_next_guess_rests(
    looking: tuple[Path, EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of step: prompts, some in chunks, plain ones and such that verify."""
    core, rng = looking[1], random.Random(4)
    monkeypatch.setattr(
        core.part(Drafts).planner.acceptance, "best", lambda n, lengths, **runs: rng.choice([1, lengths[-1]])
    )
    found: list[int] = []

    def check(number: int) -> None:
        for state in core.scheduler.requests.running:
            if state.output:
                run = int(core.scheduler.requests.run[state.slot])
                assert run == _stood_before([*state.request.prompt, *state.output], 1, 3)
                found.append(run)

    prompts = _repeating(311, 7)
    core.reset_prefix_cache()
    finish(core, [request(str(i), p, replace(GREEDY, max_tokens=40)) for i, p in enumerate(prompts)], check)
    assert {0, 1, 2} <= set(found)
    assert max(found) > 8


def _pulling(logits: Any, rows: Any) -> None:
    """Edits a row by all that stands before it."""
    for row, told in zip(logits, rows, strict=True):
        text = [*told.prompt, *told.output]
        row[(7 * sum(text) + len(text)) % 300] += 0.7
        row[text[-1]] -= 0.3


def test_logits_processors_that_look_at_nothing_but_a_row(
    looking: tuple[Path, EngineCore], llama_place: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Rows behind drafts are told of the drafts before them, be these of the device or of the host. A processor that
    does not say that it is of that kind is never asked for such rows."""

    def rowwise(logits: Any, rows: Any) -> None:
        _pulling(logits, rows)

    rowwise.rowwise = True  # type: ignore[attr-defined]
    prompts, wanted = _repeating(311, 8), []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0 if i % 2 else 0.4, seed=i, max_tokens=40, ignore_eos=True)
        wanted.append(request(str(i), prompt, params))
    plain = open_core(checkpoint, looking[0], pages=100, processors=[_pulling])
    alone = {id: r.tokens for id, r in finish(plain, wanted).items()}
    assert plain.stats().drafts == 0
    assert "drafts are not verified: the logits processor _pulling does not say that it is rowwise" in caplog.text
    plain.close()
    device = open_core(checkpoint, looking[0], pages=100, processors=[rowwise])
    own = SpeculationConfig(draft_proposer="ngram")
    host = open_core(checkpoint, llama_place, pages=100, processors=[rowwise], speculation=own)
    for core in (device, host):
        monkeypatch.setattr(core.part(Drafts).planner.acceptance, "best", _most)
        short = [r for r in wanted if core is device or len(r.prompt) < 50]
        found = finish(core, short)
        assert {r.id: found[r.id].tokens for r in short} == {r.id: alone[r.id] for r in short}
        assert sum(core.stats().accepted_tokens) > 10
        core.close()


def _wanting(i: int, kind: str, prompt: list[int], temperature: float) -> EngineRequest:
    """A request that asks for something that plain sampling does not look at."""
    asked: dict[str, Any] = {
        "penalties": {"repetition_penalty": 1.02, "frequency_penalty": 0.03, "presence_penalty": -0.1},
        "bias": {"logit_bias": {prompt[0]: 1.5, prompt[-1]: -0.7, 7: -100.0}},
        "mask": {"allowed_token_ids": tuple(range(3, 290, 2))},
        "words": {},
        "least": {"min_tokens": 30, "stop_token_ids": tuple(range(3, 40))},
        "scores": {"logprobs": 2, "prompt_logprobs": 1},
        "every": {"logprobs": 30, "presence_penalty": 0.05, "logit_bias": {9: 0.5}, "min_tokens": 5},
    }[kind]
    params = SamplingParams(temperature=temperature, seed=i, max_tokens=50, ignore_eos=True, **asked)
    words = [[t, u] for t, u in itertools.pairwise(prompt)][:4] if kind == "words" else []
    return request(str(i), prompt, params, bad_words=words)


@pytest.mark.parametrize("temperature", [0.0, thorough(0.3)])
def test_every_kind_of_request_is_verified(
    looking: tuple[Path, EngineCore], llama: EngineCore, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds in one batch, and each alone: each token, its log-probabilities and the ends are as without drafts."""
    kinds = ("penalties", "bias", "mask", "words", "least", "scores", "every")
    prompts = [p[:12] for p in _repeating(311, 7)][: len(kinds)]
    wanted = [_wanting(i, kind, p, temperature) for i, (kind, p) in enumerate(zip(kinds, prompts, strict=True))]
    _, core = looking
    monkeypatch.setattr(core.part(Drafts).planner.acceptance, "best", _most)
    for each in (llama, core):
        each.reset_prefix_cache()
    alone, won = finish(llama, wanted), {}
    for some in (wanted, *([w] for w in wanted)):
        before = core.stats()
        found = finish(core, some)
        after = core.stats()
        assert after.drafts - before.drafts > 10
        won[some[0].id if len(some) == 1 else "all"] = sum(after.accepted_tokens) - sum(before.accepted_tokens)
        for id, got in found.items():
            plain = alone[id]
            assert got.tokens == plain.tokens, kinds[int(id)]
            assert (got.finish_reason, got.stop_reason) == (plain.finish_reason, plain.stop_reason)
            assert len(got.logprobs) == len(plain.logprobs)
            for one, other in zip(got.logprobs, plain.logprobs, strict=True):
                assert (one.token, one.rank, len(one.top_ids)) == (other.token, other.rank, len(other.top_ids))
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert temperature or min(won.values()) > 0, won


@pytest.mark.parametrize(("method", "temperatures"), [thorough("synthetic", (0.0, 1.0)), ("typical", (0.8,))])
def test_lossy_acceptance(
    method: str, temperatures: tuple[float, ...], checkpoint: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synthetic: of three drafts as many are accepted as the rate says, whatever they are, of greedy requests and
    others. Typical: all but the unlikeliest, with a threshold that is low."""
    rate: dict[str, Any] = (
        {"synthetic_acceptance_rate": 0.7} if method == "synthetic" else {"posterior_threshold": 1e-6}
    )
    rate |= {"prompt_lookup_max": 2, "max_model_len": 160, "max_num_seqs": 8, "rejection_sample_method": method}
    core = open_core(checkpoint, _artifact(checkpoint, device, **rate), pages=200)
    monkeypatch.setattr(core.part(Drafts).planner.acceptance, "best", _most)
    requests = []
    for i, p in enumerate(_prompts(311, 3)[:8]):
        params = SamplingParams(temperature=temperatures[i % len(temperatures)], max_tokens=110, ignore_eos=True)
        requests.append(request(str(i), p[:8] * 4, params, seed=i))
    finish(core, requests)
    stats = core.stats()
    core.close()
    of = np.array([stats.drafts, *stats.accepted_tokens[:-1]])
    rates = np.array(stats.accepted_tokens) / of
    assert of.min() > 100
    if method == "typical":
        assert (rates > 0.95).all(), rates
    else:
        assert (abs(rates - 0.7) < 4.5 * np.sqrt(0.21 / of)).all(), rates


def _allowed(masks: np.ndarray, token: int) -> list[bool]:
    return [bool(row[token >> 5] >> (token & 31) & 1) for row in masks]


def test_masks_behind_drafts() -> None:
    """Each position has the mask of the output before it, drafts included; behind a draft that may not come, none."""
    table, thinking = SamplingTable(2, 64, 0), ThinkingBudget(tokens=2, start=60, end=61, begun=True)
    params = SamplingParams(min_tokens=3, stop_token_ids=(9,), allowed_token_ids=tuple(range(40)))
    wire = request("a", [1, 2], params, bad_words=[[5, 6], [8, 5, 7]])
    state = RequestState(wire, (0, 0))
    state.slot, state.output = 1, [8]
    table.admit(state)
    table.stop_at_logits(state.slot)
    constraints = Constraints(table)
    constraints.add("a", *Letters().constraints(wire.params))
    masks = np.full((4, table.words), -1, dtype=np.int32)
    constraints.write(state, masks, [5, 4, 5])
    assert _allowed(masks, 6) == [True, False, True, False]
    assert _allowed(masks, 7) == [True, False, True, True]
    assert _allowed(masks, 9) == [False, False, True, True]
    assert _allowed(masks, 41) == [False] * 4
    masks[:] = -1
    constraints.write(state, masks, [5, 6, 4])
    assert _allowed(masks, 41) == [False, False, True, True]  # nothing is known behind 5, 6
    masks[:] = -1
    constraints.write(state, masks, [-1, 3, 3])
    assert _allowed(masks, 41) == [False, True, True, True]

    forced = RequestState(request("b", [1], SamplingParams(), thinking=thinking), (0, 0))
    forced.slot, forced.output = 0, [8]
    table.admit(forced)
    table.stop_at_logits(forced.slot)
    masks[:] = -1
    constraints.write(forced, masks, [3, 61, 4])
    assert _allowed(masks, 30) == [True, False, True, True]
    assert _allowed(masks, 61) == [True, True, True, True]


END, BREAK = 60, 7


class Counting:
    """A matcher in which a token is the one before plus one, modulo four, or ends the text, or breaks what it knows."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    @classmethod
    def matcher(cls) -> Counting:
        return cls()

    @property
    def finished(self) -> bool:
        return self.taken[-1:] == [END]

    def advance(self, token: int) -> None:
        if self.finished:
            raise GrammarError("after the end")
        self.taken.append(token)

    def allow(self, row: np.ndarray) -> None:
        if self.taken[-1:] == [BREAK]:
            raise GrammarError("a limit of the library")
        row[:] = 0
        for t in _next(self.taken[-1]):
            row[t >> 5] |= np.int32(1 << (t & 31))

    def rollback(self, tokens: int) -> None:
        assert tokens <= len(self.taken)
        del self.taken[len(self.taken) - tokens :]


def _next(token: int) -> set[int]:
    return {(token + 1) % 4, END, BREAK}


def test_branches_that_end_or_break_leave_the_others_their_masks() -> None:
    table = SamplingTable(1, 64, 0)
    state = RequestState(request("a", [1], SamplingParams()), (0, 0))
    state.slot, state.output = 0, [2]
    table.admit(state)
    table.stop_at_logits(state.slot)
    constraints = Constraints(table)
    constraints.add("a", Counting, None)  # type: ignore[arg-type]
    constraints.advance(state, [2])
    tree = token_tree("[(0,),(1,),(2,),(0,0),(1,0),(1,1),(2,0),(0,0,0),(2,0,0),(2,0,1)]")
    masks, rng = np.zeros((11, table.words), dtype=np.int32), random.Random(4)
    masked = 0
    for _ in range(300):
        drafts = [rng.choice((0, 1, 2, 3, 3, END, BREAK, -1)) for _ in range(10)]
        masks[:] = -1
        constraints.write(state, masks, drafts, tree)
        for node, path in enumerate([(), *tree.paths]):
            tokens = [drafts[tree.paths.index(path[:n])] for n in range(1, len(path) + 1)]
            goes_on = all(t in _next(last) and t < 4 for last, t in itertools.pairwise([2, *tokens]))
            allowed = _next([2, *tokens][-1]) if goes_on else set(range(64))
            assert {t for t in range(64) if _allowed(masks[node : node + 1], t)[0]} == allowed, (drafts, node)
            masked += goes_on and node > 0
    assert masked > 200


def test_drafts_that_are_wrong_are_not_verified_each_step() -> None:
    acceptance = Acceptance(3)
    wrong, right = np.ones(4, dtype=np.int32), np.full(4, 4, dtype=np.int32)
    verified = 0
    three = np.full(4, 3)
    for _ in range(400):
        if acceptance.best(4, [4]) == 4:
            acceptance.learn(wrong, three)
            verified += 1
    assert 20 < verified < 120
    for _ in range(4):
        while acceptance.best(4, [4]) == 1:
            pass
        acceptance.learn(right, three)
    assert all(acceptance.best(4, [4]) == 4 for _ in range(3))


def test_probabilities_that_nobody_keeps(checkpoint: Path) -> None:
    for more, message in (
        ({"rejection_sample_method": "typical"}, "draft_sample_method is probabilistic: typical acceptance does not"),
        ({"prompt_lookup_max": 2}, "draft_sample_method is probabilistic, but there is no draft model"),
    ):
        with pytest.raises(ConfigError, match=message):
            _artifact(checkpoint, draft_sample_method="probabilistic", **more)


def test_as_many_drafts_as_are_right() -> None:
    """What is verified is what gives the most tokens for its time: shorter runs where the last drafts are wrong, or
    where measured times say so, and nothing above a batch size."""
    acceptance = Acceptance(7, off_above=8)
    lengths = [2, 3, 5, 8]
    assert acceptance.best(4, lengths) == 8
    assert [acceptance.best(n, lengths) for n in (9, 8)] == [1, 8]
    for _ in range(100):
        acceptance.learn(np.array([3, 3, 2, 3]), np.array([7, 7, 7, 5]))
    assert acceptance.best(1, lengths) == 3
    assert acceptance.by_position.tolist() == [400, 300, 0, 0, 0, 0, 0]
    assert (acceptance.drafts, acceptance.draft_tokens) == (400, 2600)
    for _ in range(50):
        for q, seconds in ((1, 1.0), (2, 1.05), (3, 1.9), (5, 2.0), (8, 2.0)):
            acceptance.timed(q, 3, seconds)
    assert acceptance.best(3, lengths) == 2
    acceptance.learn(np.array([9, 9]), np.array([0, 0]))  # nothing was drafted
    assert acceptance.drafts == 400


def test_what_drafts_cost_is_measured_beside_steps_without_any() -> None:
    """Drafts that seem to pay by what they usually cost, and here do not."""
    acceptance, some = Acceptance(3), (np.array([2]), np.array([3]))
    assert acceptance.best(1, [4]) == 4
    for _ in range(30):
        acceptance.learn(*some)
    assert acceptance.best(1, [4]) == 4
    acceptance.timed(4, 1, 3.0)
    assert acceptance.best(1, [4]) == 1  # until it is known what such a step takes
    acceptance.timed(1, 1, 1.0)
    assert acceptance.best(1, [4]) == 4
    for _ in range(8):
        acceptance.timed(4, 1, 3.0)
    assert [acceptance.best(1, [4]) for _ in range(32)].count(4) == 2
    for _ in range(10):
        acceptance.timed(4, 1, 1.1)
    chosen = "".join(str(acceptance.best(1, [4])) for _ in range(192))
    assert chosen.count("1") == chosen.count("11") * 2 == 6
    # What a plain step takes is not seen from one behind a step that verifies, which waits for the host.
    acceptance.timed(1, 1, 0.1)
    assert acceptance.best(1, [4]) == 4


@pytest.mark.slow
def test_compiled_verification(checkpoint: Path) -> None:
    place = _artifact(checkpoint, backend="inductor")
    core, prompts = open_core(checkpoint, place, pages=100), _prompts(311, 1)
    alone, lengths = _run(core, prompts, [[]] * len(prompts), 1.0)
    assert max(lengths) == 1
    core.reset_prefix_cache()
    found, lengths = _run(core, prompts, alone, 0.8)
    core.close()
    assert found == alone
    assert 4 in lengths
