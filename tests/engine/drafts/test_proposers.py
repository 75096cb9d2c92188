"""Proposers on the host: what they guess, and that guesses, good or bad, change no text."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm import LLM
from graphllm.config import ConfigError, SpeculationConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.drafts.ngram import NgramProposer
from graphllm.engine.drafts.proposers import find_proposer
from graphllm.engine.drafts.suffix import SuffixProposer
from graphllm.engine.parts.drafts import Drafts
from graphllm.engine.requests.request import EngineRequest
from tests.artifacts import artifact_of
from tests.engine.harness import finish, open_core, request
from tests.tiers import draws, thorough


def _followed(text: Sequence[int], most: int, fewest: int, count: int) -> list[int]:
    """By brute force: what followed the latest of the longest runs that equal the last tokens."""
    for n in range(min(most, len(text)), fewest - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == text[-n:]:
                return [text[at + i % (len(text) - at)] for i in range(count)]
    return []


_TOKENS = st.lists(st.integers(0, 3), max_size=30)


@given(_TOKENS, st.lists(_TOKENS, min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=draws(50, 150), deadline=None)
def test_ngram(prompt: list[int], steps: list[list[int]], fewest: int, more: int) -> None:
    """However many tokens come at a time."""
    proposer = NgramProposer(SpeculationConfig(ngram_proposer_min=fewest, ngram_proposer_max=fewest + more))
    output: list[int] = []
    for new in steps:
        output += new
        assert list(proposer.propose("a", prompt, output, 5)) == _followed(prompt + output, fewest + more, fewest, 5)
    proposer.end("a", output)
    assert proposer.propose("a", [1, 2], [1], 2) == ([2, 1] if fewest == 1 else [])


def _likely(texts: Sequence[Sequence[int]], tail: Sequence[int], depth: int) -> tuple[int, set[int]]:
    """By brute force: the longest agreement with the tail that something follows, and the tokens that most often do."""
    places = [(text, at) for text in texts for at in range(1, len(text))]

    def same(text: Sequence[int], at: int) -> int:
        n = 0
        while n < min(depth, at, len(tail)) and text[at - 1 - n] == tail[-1 - n]:
            n += 1
        return n

    longest = max((same(t, at) for t, at in places), default=0)
    if not longest:
        return 0, set()
    after = [t[at] for t, at in places if same(t, at) == longest]
    return longest, {t for t in after if after.count(t) == max(map(after.count, after))}


@given(_TOKENS.filter(bool), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=3))
@settings(max_examples=draws(50, 150), deadline=None)
def test_suffix(prompt: list[int], steps: list[list[int]]) -> None:
    """The first draft is what most often followed the longest agreement, in this text or in those that ended; no more
    drafts than tokens agree."""
    depth = 5
    proposer = SuffixProposer(SpeculationConfig(draft_proposer="suffix", suffix_decoding_max_tree_depth=depth))
    output: list[int] = []
    for new in steps:
        output += new
        text = prompt + output
        drafts = proposer.propose("a", prompt, output, 8)
        longest, likely = _likely([text], text[-depth:], depth)
        assert len(drafts) <= longest
        if longest:
            assert drafts[0] in likely
    proposer.end("a", output)
    tail = output[-3:]
    found = proposer.propose("b", [9], tail, 8)
    own, _ = _likely([[9, *tail]], [9, *tail], depth)
    longest, likely = _likely([output], [9, *tail], depth)
    assert bool(found) == bool(longest or own)
    if longest and not own:
        assert found[0] in likely


def test_suffix_forgets_the_oldest() -> None:
    proposer = SuffixProposer(SpeculationConfig(suffix_decoding_max_cached_requests=2))
    for id in "abc":
        proposer.propose(id, [1], [], 4)
        proposer.end(id, [10 + ord(id), 20 + ord(id), 30 + ord(id)])
    assert [proposer.propose(f"x{id}", [5], [10 + ord(id)], 4) for id in "abc"] == [[], [118], [119]]
    assert len(proposer._earlier.texts) == 2


class Guesses:
    """A user's proposer: at random something that was said, nothing, too much, or nonsense."""

    def __init__(self, settings: SpeculationConfig) -> None:
        self.rng, self.ended = random.Random(1), 0

    def propose(self, id: str, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        text = [*prompt, *output]
        kind = self.rng.randrange(4)
        if kind == 0:
            return []
        if kind == 1:
            return [self.rng.randrange(311) for _ in range(self.rng.randint(1, count + 3))]
        return _followed(text, 3, 1, self.rng.randint(1, count + 2))

    def end(self, id: str, output: Sequence[int]) -> None:
        self.ended += 1


class Wrong(Guesses):
    def propose(self, id: str, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        return [5000]


@pytest.fixture(scope="module")
def place(checkpoint: Path) -> Path:
    return artifact_of(
        checkpoint, backend="eager", dtype="float32", max_model_len=128, max_num_seqs=6, max_num_batched_tokens=48,
        block_size=8, num_speculative_tokens=4, dynamic_speculative_tokens=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(checkpoint: Path, place: Path) -> Iterator[EngineCore]:
    core = open_core(checkpoint, place, pages=100)
    yield core
    core.close()


def _requests(seed: int) -> list[EngineRequest]:
    """Repeating prompts, some longer than a step; all that requests may ask for, in turn."""
    rng, found = random.Random(seed), []
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.4, "top_k": 12}, {"repetition_penalty": 1.03, "presence_penalty": 0.05},
        {"logprobs": 1, "frequency_penalty": -0.03}, {"min_tokens": 20, "stop_token_ids": tuple(range(60))},
        {"logit_bias": {7: 2.0, 9: -5.0}, "temperature": 0.2}, {"stop_token_ids": tuple(range(100, 110))},
    ]  # fmt: skip
    for i in range(14):
        words = [rng.randrange(5, 311) for _ in range(rng.randint(2, 9))]
        asked = {"temperature": 0.0, **kinds[i % len(kinds)]}
        params = SamplingParams(
            seed=i, max_tokens=rng.choice((1, 3, 40, 60)) + asked.get("min_tokens", 0), ignore_eos=True, **asked
        )
        bad = [words[:2]] if i % 3 == 0 else []
        found.append(request(str(i), words * rng.randint(1, 7), params, bad_words=bad))
    return found


@pytest.mark.parametrize("pages", [thorough(100), 24])
@pytest.mark.parametrize("proposer", [thorough("ngram"), "suffix", thorough("Guesses")])
def test_guesses_change_no_text(
    proposer: str, pages: int, plain: EngineCore, checkpoint: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts in chunks, with the prefix cache, and where requests lose their blocks."""
    if proposer == "Guesses":
        monkeypatch.setitem(sys.modules, "own_proposers", SimpleNamespace(Guesses=Guesses))
        proposer = "own_proposers:Guesses"
    core = open_core(checkpoint, place, pages=pages, speculation=SpeculationConfig(draft_proposer=proposer))
    monkeypatch.setattr(
        core.part(Drafts).planner.acceptance, "best", lambda sequences, lengths, share: lengths[-1]
    )  # no clock
    for seed in (1, 2):
        wanted = _requests(seed)
        plain.reset_prefix_cache()
        alone, found = finish(plain, wanted), finish(core, wanted)
        for r in wanted:
            assert found[r.id].tokens == alone[r.id].tokens, r.id
            ends = (found[r.id].finish_reason, found[r.id].stop_reason)
            assert ends == (alone[r.id].finish_reason, alone[r.id].stop_reason)
            assert [x.token for x in found[r.id].logprobs] == [x.token for x in alone[r.id].logprobs]
    stats = core.stats()
    core.close()
    assert stats.drafts > 100
    assert sum(stats.accepted_tokens) > 30
    assert stats.draft_tokens < stats.drafts * 4
    assert (stats.preemptions > 0) == (pages < 50)


def test_nothing_above_a_batch_size(checkpoint: Path, place: Path) -> None:
    speculation = SpeculationConfig(draft_proposer="ngram", speculative_disable_by_batch_size=1)
    core = open_core(checkpoint, place, pages=100, speculation=speculation)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    two = [request(id, [7, 8, 9] * 4, params) for id in "ab"]
    finish(core, two)
    assert core.stats().drafts == 0
    finish(core, two[:1])
    assert core.stats().drafts > 0
    core.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_proposer": "trie"}, "draft_proposer is 'trie': there are ngram, suffix, what packages offer"),
        ({"draft_proposer": "no.such:Thing"}, r"draft_proposer: 'no.such:Thing' cannot be imported \\(.*\\)"),
        ({"draft_proposer": "builtins:repr"}, "draft_proposer is 'builtins:repr': it has no methods propose and end"),
        (
            {"draft_proposer": "ngram", "ngram_proposer_max": 2, "ngram_proposer_min": 3},
            "ngram_proposer_min is 3: it is more than ngram_proposer_max, 2",
        ),
    ],
)
def test_proposers_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("\\\\", "\\")):
        find_proposer(SpeculationConfig(**settings))


def test_what_a_package_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = SimpleNamespace(load=lambda: Guesses)
    monkeypatch.setattr(
        "graphllm.engine.drafts.proposers.entry_points",
        lambda group, name: [offered] if (group, name) == ("graphllm.proposers", "guesses") else [],
    )
    assert isinstance(find_proposer(SpeculationConfig(draft_proposer="guesses")), Guesses)
    assert find_proposer(SpeculationConfig()) is None


def test_a_proposer_that_invents_tokens(checkpoint: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_proposers", SimpleNamespace(Wrong=Wrong))
    core = open_core(checkpoint, place, pages=100, speculation=SpeculationConfig(draft_proposer="own_proposers:Wrong"))
    with pytest.raises(ConfigError, match=r"draft_proposer: Wrong proposed \[5000\]; not all of these are tokens"):
        finish(core, [request("a", [5, 6], SamplingParams(max_tokens=9))])
    core.close()


def test_artifacts_that_do_not_verify(checkpoint: Path, eager_artifact: Path) -> None:
    with pytest.raises(ConfigError, match="draft_proposer is 'suffix', but num_speculative_tokens is 0: give num_"):
        open_core(checkpoint, eager_artifact, speculation=SpeculationConfig(draft_proposer="suffix"))


@pytest.mark.thorough
def test_through_llm() -> None:
    """From `speculative_config` to texts: stop strings within what is accepted at once, several completions with seeds,
    log-probabilities of every token, and what a request is told of its drafts."""
    words = "red green blue red green blue red green blue red green"
    wanted = [
        SamplingParams(temperature=0.0, max_tokens=40, logprobs=1),
        SamplingParams(temperature=0.6, n=3, seed=5, max_tokens=40, logprobs=0, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=40, presence_penalty=0.1, min_tokens=30),
    ]
    messages = [{"role": "user", "content": f"Repeat: {words}"}]
    options = {"backend": "eager", "target": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    found: list[Any] = []
    text = ""
    for method in (None, "suffix", "ngram"):
        speculation = {} if method is None else {
            "speculative_config": {"method": method, "num_speculative_tokens": 4, "disable_by_batch_size": 7}
        }  # fmt: skip
        with LLM(**options, **speculation) as llm:
            if not found:
                text = llm.chat(messages, wanted[0])[0].outputs[0].text
                assert len(text) > 30
                for kept in (False, True):
                    wanted.append(SamplingParams(
                        temperature=0.0, max_tokens=40, stop=[text[20:24], "~"], include_stop_str_in_output=kept
                    ))  # fmt: skip
            outputs = llm.chat([messages] * len(wanted), wanted)
        texts = [
            [(c.text, c.token_ids, c.finish_reason, c.stop_reason, [list(p) for p in c.logprobs or []])
             for c in o.outputs]
            for o in outputs
        ]  # fmt: skip
        found.append(texts)
        assert texts == found[0], method
        drafted = sum(o.metrics.draft_tokens for o in outputs)
        accepted = sum(o.metrics.accepted_tokens for o in outputs)
        assert (drafted > 0) == (accepted > 0) == (method is not None)
        assert accepted < drafted or not drafted
    assert [ends[0][3] for ends in found[0][-2:]] == [text[20:24]] * 2
