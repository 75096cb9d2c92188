"""A thousand prompts and hundreds of mixed requests: with every proposer, in every difficult place, each text is the
one of plain decoding, and no block is left behind. Slow; the tests beside this one look at the same things apart."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.training.evaluate import held_out
from bench.training.tasks import TASKS
from graphllm.config import SpeculationConfig
from graphllm.config.requests.sampling_params import SamplingParams, StructuredOutputsParams
from graphllm.embedded import DRAFTS, MODEL_DIR
from graphllm.engine.core import EngineCore
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.requests.text import Tokenizer
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from tests.artifacts import artifact_of
from tests.engine.drafts.test_draft_models import LEN, METHODS, Opened, V, _open, made_model
from tests.engine.harness import Result, finish, open_core, request, verify_all_drafts

pytestmark = pytest.mark.slow
Places = Callable[[str], Path]
PROMPTS, TOKENS = 1000, 32
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]"
GROWN = '{"top_k": 2, "depth": 4, "drafts": 7}'
# Of the draft models that come with the embedded one, and the tree that they fill.
DRAFTERS: dict[str, tuple[str, str | None]] = {
    "medusa": ("medusa", None),
    "eagle3": ("eagle3", None),
    "draft_model": ("draft_model", None),
    "medusa, tree": ("medusa", TREE),
    "eagle3, tree": ("eagle3", TREE),
    "eagle3, grown tree": ("eagle3", GROWN),
}


class Random:
    """Drafts that are wrong, right and absent at random; a trap where a run stood before with another end."""

    def __init__(self, settings: SpeculationConfig) -> None:
        self.rng = random.Random(3)

    def propose(self, id: str, prompt: list[int], output: list[int], count: int) -> list[int]:
        text = [*prompt, *output]
        at = self.rng.randrange(len(text))
        return text[at : at + self.rng.randint(0, count)]

    def end(self, id: str, output: list[int]) -> None:
        pass


def _place(proposer: str) -> Path:
    method, tree = DRAFTERS.get(proposer, (None, None))
    more: dict[str, Any] = {"dynamic_speculative_tokens": True, "num_speculative_tokens": 4}
    if proposer == "device":
        more = {"prompt_lookup_max": 3, "num_speculative_tokens": 4}
    elif method is not None:
        more = {"num_speculative_tokens": 3} if tree is None else {"speculative_token_tree": tree}
    source = open_source(MODEL_DIR) if method is None else open_source(MODEL_DIR, draft=DRAFTS[method], method=method)
    return artifact_of(
        source, dtype="float32", max_model_len=768, max_num_seqs=32, max_num_batched_tokens=512, block_size=8, **more
    )


@pytest.fixture(scope="module")
def places() -> Places:
    """Artifacts by proposer; those that guess on the host have one."""
    return _place


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of all tasks of the embedded model; every third says its own text again, so that drafts are found, and every
    ninth with another word in it, so that what follows is not what followed before."""
    tokenizer, found, rng = Tokenizer.from_folder(MODEL_DIR), [], random.Random(1)
    names = sorted(TASKS)
    for i, name in enumerate(names):
        for sample in held_out(name, -(-PROMPTS // len(names)) + 5, i):
            messages = [dict(m) for m in sample.messages]
            if sample.tools or any(not isinstance(m.get("content"), str) for m in messages):
                continue
            if len(found) % 3 == 0:
                words = str(messages[-1]["content"]).split()
                again = [rng.choice(words) if len(found) % 9 == 0 and rng.random() < 0.2 else w for w in words]
                messages[-1]["content"] = " ".join([*words, *again, *words])
            ids = tokenizer.encode_chat(messages)
            if len(ids) < 600:
                found.append(ids)
    rng.shuffle(found)
    assert len(found) >= PROMPTS
    return found[:PROMPTS]


def _core(places: Places, proposer: str, pages: int, **options: Any) -> EngineCore:
    """pages: of 8 tokens of the model; a draft model's own cache comes on top, in blocks of another size."""
    memory = Artifact.open(places(proposer)).memory
    pages = pages * 8 * memory.token // memory.block
    stops = tuple(sorted(Tokenizer.from_folder(MODEL_DIR).stop_ids))
    on_device = {"plain": None, "device": None, **dict.fromkeys(DRAFTERS)}
    own = {**on_device, "random": f"{__name__}:Random"}.get(proposer, proposer)
    options |= {"draft": DRAFTS[DRAFTERS[proposer][0]]} if proposer in DRAFTERS else {}
    speculation = SpeculationConfig(draft_proposer=own)
    core = open_core(MODEL_DIR, places(proposer), pages=pages, stop_ids=stops, speculation=speculation, **options)
    if proposer != "plain":
        verify_all_drafts(core)
    return core


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chunks": {"options": {"long_prefill_token_threshold": 11}},
    "few blocks": {"pages": 110},
    "penalties": {"params": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}},
    "grammar": {"params": {"structured_outputs": StructuredOutputsParams(regex=r"[A-Za-z0-9 .,:;'?!-]{1,90}")}},
    "biased, logged": {"params": {"logit_bias": {300: 1.5, 301: -2.0}, "logprobs": 1, "min_tokens": 8}},
}


@pytest.fixture(scope="module")
def expected(places: Places, prompts: list[list[int]]) -> Callable[[str], dict[str, Result]]:
    """By what is asked for, what plain decoding gives."""

    @functools.cache
    def asked(way: str) -> dict[str, Result]:
        core = _core(places, "plain", 2000)
        found = finish(core, _wanted(prompts, WAYS[way]))
        core.close()
        return found

    return lambda way: asked(way if "params" in WAYS[way] else "alone")


def _wanted(prompts: list[list[int]], way: dict[str, Any]) -> list[EngineRequest]:
    stops = sorted(Tokenizer.from_folder(MODEL_DIR).stop_ids)
    params = replace(SamplingParams(temperature=0.0, max_tokens=TOKENS), **way.get("params", {}))
    return [request(str(i), p, params, stop_ids=stops) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("proposer", ["device", "ngram", "suffix", "random", *DRAFTERS])
def test_a_thousand_prompts(
    proposer: str, way: str, places: Places, prompts: list[list[int]], expected: Callable[[str], dict[str, Result]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Random=Random))
    chosen = WAYS[way]
    core = _core(places, proposer, chosen.get("pages", 2000), **chosen.get("options", {}))
    found = finish(core, _wanted(prompts, chosen))
    alone = expected(way)
    different = [id for id, got in found.items() if got.tokens != alone[id].tokens]
    stats = core.stats()
    core.close()
    print(f"{proposer}, {way}: {stats.drafts} drafts, length {1 + sum(stats.accepted_tokens) / stats.drafts:.2f}")
    assert different == []
    assert all(got.finish_reason == alone[id].finish_reason for id, got in found.items())
    assert sum(stats.accepted_tokens) > 100
    assert (stats.preemptions > 0) == (way == "few blocks")


@pytest.fixture(scope="module")
def random_heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], tuple[Opened, Path]]:
    """By method, and whether it fills a tree: a random model with a head, compiled, and one without the head."""

    @functools.cache
    def opened(name: str, branches: bool) -> tuple[Opened, Path]:
        model, folder = made_model(), tmp_path_factory.mktemp("heads")
        more: dict[str, Any] = {"speculative_token_tree": TREE, "num_speculative_tokens": 0} if branches else {}
        sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_model_len": LEN, "block_size": 8}
        found = _open(model, METHODS[name](model), folder, "inductor", **sizes, **more)
        found.core.close()
        return found, artifact_of(found.folder, dtype="float32", **sizes)

    return opened


@pytest.mark.parametrize("way", [way for way in WAYS if way != "grammar"])  # the random model's tokens are no text
@pytest.mark.parametrize("branches", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["eagle", "mtp", "mlp_speculator"])
def test_heads_of_random_weights(
    name: str, branches: bool, way: str, random_heads: Callable[[str, bool], tuple[Opened, Path]]
) -> None:
    """A thousand prompts with heads that none is trained of here; they are right now and then, as the model has a
    favourite for what follows each token."""
    opened, plain = random_heads(name, branches)
    rng, chosen = random.Random(5), WAYS[way]
    wanted, params = [], replace(SamplingParams(temperature=0.0, max_tokens=24), **chosen.get("params", {}))
    if params.logit_bias:
        params = replace(params, logit_bias={30: 1.5, 31: -2.0})
    for i in range(PROMPTS):
        again = [rng.randrange(1, V) for _ in range(rng.randint(1, 20))]
        wanted.append(request(str(i), (again * 3)[: rng.randint(1, 60)], params, stop_ids=[5]))
    core = open_core(opened.folder, plain, 400)
    alone = finish(core, wanted)
    core.close()
    pages = 60 if way == "few blocks" else 400
    core = open_core(opened.folder, opened.place, pages, draft=opened.draft, **chosen.get("options", {}))
    verify_all_drafts(core)
    found, stats = finish(core, wanted), core.stats()
    core.close()
    print(
        f"{name}, {branches}, {way}: {stats.drafts} drafts, length {1 + sum(stats.accepted_tokens) / stats.drafts:.2f}"
    )
    assert [id for id, got in found.items() if got.tokens != alone[id].tokens] == []
    assert all(got.finish_reason == alone[id].finish_reason for id, got in found.items())
    assert sum(stats.accepted_tokens) > 20
    assert (stats.preemptions > 0) == (way == "few blocks")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("proposer", ["device", "suffix", "random", *DRAFTERS])
def test_mixed_requests(
    proposer: str, seed: int, places: Places, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 requests of mixed configurations over few blocks, which come and are aborted at any time: greedy texts are
    those of plain decoding, and so are drawn ones; nothing is left."""
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Random=Random))
    rng = random.Random(seed)
    kinds = [way.get("params", {}) for way in WAYS.values()]
    kinds += [{"temperature": 0.5, "seed": 9}, {"temperature": 0.8, "top_p": 0.9, "seed": 4, "presence_penalty": 0.3}]
    stops, wanted = sorted(Tokenizer.from_folder(MODEL_DIR).stop_ids), []
    for i in range(500):
        p = rng.choice(prompts)
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": rng.randint(8, 60), **rng.choice(kinds)})
        fork = f"{i - 1}" if i and wanted[-1].prompt == p else ""
        wanted.append(request(str(i), p, params, stop_ids=stops, fork_of=fork, priority=rng.randrange(3)))
    plain = _core(places, "plain", 2000)
    alone = finish(plain, wanted)
    plain.close()
    core = _core(places, proposer, 96, scheduling_policy="priority", long_prefill_token_threshold=rng.choice((0, 30)))
    late, gone = list(wanted), set()
    found = {r.id: Result() for r in wanted}
    while late or core.unfinished:
        for _ in range(min(len(late), rng.randrange(8))):
            core.add(late.pop(0))
        if rng.random() < 0.03 and len(late) < 490:
            id = rng.choice(wanted[: 500 - len(late)]).id
            core.abort([id])
            gone.add(id)
        if rng.random() < 0.02:
            core.reset_prefix_cache()
        for update in core.step():
            found[update.id].take(update)
    stats = core.stats()
    core.close()
    assert stats.free_blocks == stats.total_blocks
    assert stats.preemptions > 0
    for id, got in found.items():
        if got.finish_reason == "abort":
            assert id in gone
            assert got.tokens == alone[id].tokens[: len(got.tokens)]
        else:
            assert (got.tokens, got.finish_reason) == (alone[id].tokens, alone[id].finish_reason), id
    assert sum(stats.accepted_tokens) > 100
