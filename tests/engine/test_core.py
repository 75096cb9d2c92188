"""The engine core on a tiny random model: whatever is batched, chunked, cached, forked or preempted, a request gets
what it gets alone, and that is what transformers gives."""

from __future__ import annotations

import gc
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.grammars import Grammars
from graphllm.engine.parts.snapshots import Snapshots
from graphllm.engine.requests.request import CoreStats
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.runtime.executor import Executor
from graphllm.runtime.graphs import GraphPrograms
from graphllm.runtime.memory.padding import Size, pick
from graphllm.runtime.memory.staging import StepInput
from graphllm.runtime.step_handle import StepHandle
from tests.artifacts import LIMITS, ON, artifact_of
from tests.engine.harness import GREEDY, Result, finish, open_core, request

V = 311
Open = Callable[..., EngineCore]


@pytest.fixture
def opened(device: str, checkpoint: Path) -> Iterator[Open]:
    """opened(pages=49, **options): a core of the tiny Llama. Context 96, 4 sequences, 32 tokens a step."""
    cores, tiny = [], artifact_of(checkpoint, **{**LIMITS, **ON[device]})

    def make(folder: Path = checkpoint, place: Path = tiny, **options: Any) -> EngineCore:
        cores.append(open_core(folder, place, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


@pytest.fixture
def block_size(device: str) -> int:
    """Tokens a block in what is opened."""
    return ON[device]["block_size"]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(checkpoint).eval()


def _prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, V) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def _greedy(model: Any, prompt: list[int], count: int = 24) -> list[int]:
    """transformers' own greedy tokens."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def _logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits after the last token, float64."""
    return model(torch.tensor([tokens])).logits[0, -1].double().numpy()


def test_greedy_is_what_transformers_gives(opened: Open, model: LlamaForCausalLM, block_size: int) -> None:
    """More requests than fit in a step, prompts longer than a step's budget: batched, chunked, then from the cache."""
    core = opened(pages=200)
    prompts = _prompts(13)
    for turn in range(2):
        found = finish(core, [request(str(i), p) for i, p in enumerate(prompts)])
        for i, prompt in enumerate(prompts):
            assert found[str(i)].tokens == _greedy(model, prompt)
            assert found[str(i)].finish_reason == "length"
            assert found[str(i)].cached == (0 if turn == 0 else (len(prompt) - 1) // block_size * block_size)


def test_preempted_requests_lose_nothing(opened: Open, model: LlamaForCausalLM, block_size: int) -> None:
    core = opened(pages=1 + 104 // block_size)  # one request of full length, 96 tokens, and at most a little
    prompts = _prompts(9, seed=1, longest=40)
    found = finish(core, [request(str(i), p, replace(GREEDY, max_tokens=40)) for i, p in enumerate(prompts)])
    assert core.stats().preemptions > 3
    for i, prompt in enumerate(prompts):
        assert found[str(i)].tokens == _greedy(model, prompt, 40)


def test_the_next_step_starts_before_the_tokens_of_this_one_are_known(opened: Open, monkeypatch: Any) -> None:
    core = opened()
    events: list[str] = []
    executor = core.executor
    start = executor.start

    def watched(step: Any, full: bool = False) -> Any:
        events.append("start")
        frame = start(step, full)
        wait = frame.wait

        def waited() -> Any:
            events.append("wait")
            return wait()

        frame.wait = waited  # type: ignore[method-assign]
        return frame

    monkeypatch.setattr(executor, "start", watched)
    fed = []
    plan_next = core.scheduler.next

    def planned() -> SchedulerOutput | None:
        plan = plan_next()
        if plan is not None:
            fed.append(bool(plan.fed.any()))
        return plan

    monkeypatch.setattr(core.scheduler, "next", planned)
    finish(core, [request("a", [5, 6, 7], replace(GREEDY, max_tokens=6))])
    assert events == ["start", *["start", "wait"] * 5, "wait"]
    assert fed == [False, True, True, True, True, True]


def test_forks_share_their_prompt(opened: Open, model: LlamaForCausalLM) -> None:
    """n completions: the prompt is computed once, pages are shared and copied when written."""
    core = opened()
    prompt = _prompts(1, seed=3)[0][:20] + list(range(5, 18))  # 33 tokens at most: the last page is partial
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    seeds = [11, 12, 13, 14]
    siblings = [request(str(i), prompt, params, seed=s, fork_of="0" if i else "") for i, s in enumerate(seeds)]
    together = finish(core, siblings)
    tokens_once = core.stats().steps
    assert tokens_once < 30
    alone = {str(i): finish(opened(), [request("x", prompt, params, seed=s)])["x"] for i, s in enumerate(seeds)}
    assert {i: r.tokens for i, r in together.items()} == {i: r.tokens for i, r in alone.items()}
    assert len({tuple(r.tokens) for r in together.values()}) == 4


def test_seeds_do_not_depend_on_neighbours(opened: Open) -> None:
    rng = random.Random(5)
    prompts = _prompts(8, seed=5)
    kinds = [
        {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05}, {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 2},
    ]  # fmt: skip
    wanted = [
        request(str(i), p, SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **rng.choice(kinds)))
        for i, p in enumerate(prompts)
    ]
    alone = {r.id: finish(opened(), [r])[r.id].tokens for r in wanted}
    core = opened(pages=20)
    for seed in range(3):
        order = random.Random(seed).sample(wanted, len(wanted))
        assert {i: r.tokens for i, r in finish(core, order).items()} == alone


def _expected(
    model: Any, prompt: list[int], params: SamplingParams, bad: list[list[int]], stops: list[int]
) -> list[int]:
    """Greedy decoding with the penalties and masks of vLLM's definition, in float64 over transformers' logits."""
    output: list[int] = []
    while len(output) < params.max_tokens:  # type: ignore[operator]
        x = _logits(model, prompt + output)
        allowed = np.ones(len(x), dtype=bool)
        if params.allowed_token_ids is not None:
            allowed[:] = False
            allowed[list(params.allowed_token_ids)] = True
        for words in bad:
            if len(words) == 1 or output[-(len(words) - 1) :] == words[:-1]:
                allowed[words[-1]] = False
        if len(output) < params.min_tokens:
            allowed[stops] = False
        x[~allowed] = -np.inf
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        counts = np.bincount(output, minlength=len(x))
        seen = counts > 0
        seen[prompt] = True
        x[seen] = np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)[seen]
        x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        output.append(int(x.argmax()))
        if output[-1] in stops:
            break
    return output


@pytest.mark.parametrize("seed", range(4))
def test_penalties_and_masks(seed: int, opened: Open, model: LlamaForCausalLM) -> None:
    """Against an independent greedy decoder; all in one batch, some preempted."""
    rng = random.Random(seed)
    wanted, expected = [], {}
    for i, prompt in enumerate(_prompts(6, seed=seed, longest=20)):
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
        bad: list[list[int]] = []
        plain = _greedy(model, prompt)
        if rng.random() < 0.5:
            fields |= {"repetition_penalty": rng.choice([0.8, 1.2, 1.5]), "presence_penalty": rng.choice([0, 0.7])}
        if rng.random() < 0.5:
            fields |= {"frequency_penalty": rng.choice([-0.5, 0.4, 1.5])}
        if rng.random() < 0.5:
            fields["logit_bias"] = {t: rng.uniform(-8, 8) for t in rng.sample(range(V), 40)}
        if rng.random() < 0.4:
            fields["allowed_token_ids"] = rng.sample(range(V), 50)
        if rng.random() < 0.6:
            bad = [plain[2:4], plain[5:8], [plain[0]]]
        stops = []
        if rng.random() < 0.5:
            stops = plain[1:4]
            fields |= {"stop_token_ids": stops, "min_tokens": 9}
        params = SamplingParams(**fields)
        wanted.append(request(str(i), prompt, params, bad_words=bad, stop_ids=stops))
        expected[str(i)] = _expected(model, prompt, params, bad, stops)
    found = finish(opened(pages=24), wanted)
    for id, tokens in expected.items():
        assert found[id].tokens == tokens, wanted[int(id)]


def test_logprobs(opened: Open, model: LlamaForCausalLM) -> None:
    """Of prompt and output, against float64 log-softmax of transformers' logits; chunks and cached pages included."""
    core = opened()
    prompt = _prompts(1, seed=7)[0] + [9] * 40
    for _ in range(2):
        found = finish(core, [
            request("k", prompt, replace(GREEDY, logprobs=3, prompt_logprobs=2)),
            request("all", prompt, replace(GREEDY, max_tokens=2, logprobs=-1, prompt_logprobs=-1)),
            request("more", prompt, replace(GREEDY, max_tokens=2, logprobs=50, prompt_logprobs=30)),
            request("none", prompt, replace(GREEDY, logprobs=0)),
            request("plain", prompt),
        ])  # fmt: skip
        assert found["plain"].logprobs == []
        tokens = found["k"].tokens
        for id, top in (("k", 3), ("none", 0), ("all", V), ("more", 50)):
            assert len(found[id].logprobs) == len(found[id].tokens)
            for i, ranked in enumerate(found[id].logprobs):
                _check_ranked(ranked, tokens[i], _logits(model, prompt + tokens[:i]), top)
        for id, top in (("k", 2), ("all", V), ("more", 30)):
            scored = found[id].prompt_logprobs
            assert scored is not None
            assert len(scored) == len(prompt) - 1
            for i, ranked in enumerate(scored):
                _check_ranked(ranked, prompt[i + 1], _logits(model, prompt[: i + 1]), top)


def _check_ranked(ranked: Any, token: int, logits: np.ndarray, top: int) -> None:
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert ranked.token == token
    assert math.isclose(ranked.logprob, expected[token], abs_tol=1e-4)
    assert abs(ranked.rank - (1 + int((logits > logits[token]).sum()))) <= 1  # neighbours may be equal in float32
    order = np.sort(expected)[::-1][:top]
    np.testing.assert_allclose(ranked.top_logprobs, order, atol=1e-4)
    np.testing.assert_allclose(expected[ranked.top_ids], order, atol=1e-4)
    assert len(set(ranked.top_ids)) == top


def test_stop_tokens(opened: Open, model: LlamaForCausalLM) -> None:
    core = opened()
    prompt = _prompts(1, seed=9)[0]
    plain = _greedy(model, prompt)
    stop = plain[5]
    first = plain.index(stop)
    found = finish(
        core, [request("a", prompt, stop_ids=[stop, 3]), request("b", prompt, stop_ids=list(range(290, 311)))]
    )
    assert found["a"].tokens == plain[: first + 1]
    assert (found["a"].finish_reason, found["a"].stop_reason) == ("stop", stop)
    last = next((i for i, t in enumerate(plain) if t >= 290), 23)
    assert found["b"].tokens == plain[: last + 1]


def test_aborts_at_any_time(opened: Open, model: LlamaForCausalLM) -> None:
    """Those that go leave no page behind, those that stay get their tokens."""
    core = opened(pages=24)
    prompts = _prompts(12, seed=11, longest=50)
    rng = random.Random(0)
    plan = {rng.randrange(30): [str(i), "unknown"] for i in range(0, 12, 2)}
    found = finish(
        core, [request(str(i), p) for i, p in enumerate(prompts)], lambda step: core.abort(plan.get(step, ()))
    )
    aborted = {id for ids in plan.values() for id in ids} - {"unknown"}
    assert {i for i, r in found.items() if r.finish_reason == "abort"} <= aborted
    assert any(r.finish_reason == "abort" for r in found.values())
    for i, prompt in enumerate(prompts):
        expected = _greedy(model, prompt)
        assert found[str(i)].tokens == expected[: len(found[str(i)].tokens)]
        if str(i) not in aborted:
            assert found[str(i)].tokens == expected


def test_salts_do_not_share_pages(opened: Open) -> None:
    core = opened()
    prompt = list(range(5, 45))

    def cached(salt: str) -> int:
        return finish(core, [request("x", prompt, cache_salt=salt)])["x"].cached

    assert [cached(s) for s in ("", "", "a", "a", "b", "")] == [0, 32, 0, 32, 0, 32]
    assert core.reset_prefix_cache()
    assert cached("") == 0
    assert core.stats().prefix_hits == 96
    off = opened(enable_prefix_caching=False)
    assert [finish(off, [request("x", prompt)])["x"].cached for _ in range(2)] == [0, 0]


def test_a_prefix_is_exported_and_imported(opened: Open, block_size: int, model: LlamaForCausalLM) -> None:
    """Another core goes on with the same text and computes the last chunk only."""
    first, second = (opened(cache_secret="s") for _ in range(2))
    prompt = _prompts(1, seed=3)[0] + [9] * 30
    text = finish(first, [request("x", prompt)])["x"].tokens
    whole = request("x", prompt + text[:12], replace(GREEDY, max_tokens=12))
    entries = first.part(Snapshots).export_cache(whole)
    assert second.part(Snapshots).import_cache(entries) == len(entries) == (len(whole.prompt) - 1) // block_size
    found = finish(second, [whole])["x"]
    assert (found.tokens, found.cached) == (text[12:], block_size * len(entries))
    assert found.tokens == _greedy(model, whole.prompt, 12)


def test_nan_logits_end_the_request_with_an_error(opened: Open, device: str, checkpoint: Path, tmp_path: Path) -> None:
    """A broken checkpoint: no invented text, no dead engine."""
    broken = LlamaForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    place = artifact_of(tmp_path / "broken", max_model_len=96, **ON[device])
    core = opened(folder=tmp_path / "broken", place=place)
    for params in (GREEDY, SamplingParams(temperature=1.0, max_tokens=5, logprobs=2, top_k=3)):
        found = finish(core, [request("x", [5, 6], params), request("y", [7], params)])
        for result in found.values():
            assert (result.finish_reason, result.tokens) == ("error", [])
            assert result.error is not None
            assert "NaN" in result.error


def test_a_mask_that_forbids_everything(opened: Open) -> None:
    """min_tokens forbids the only token allowed."""
    params = replace(GREEDY, allowed_token_ids=[7], min_tokens=0)
    assert finish(opened(), [request("x", [5], params)])["x"].tokens == [7] * 24


def test_logits_processors(opened: Open, model: LlamaForCausalLM) -> None:
    """A user's function sees the requests' tokens so far and has the last word."""
    seen: list[tuple[str, int]] = []

    def evens(logits: torch.Tensor, rows: Any) -> None:
        assert logits.dtype == torch.float32
        assert len(logits) == len(rows)
        for row, told in zip(logits, rows, strict=True):
            seen.append((told.request_id, len(told.output)))
            if told.extra_args.get("even"):
                row[1::2] = -torch.inf

    core = opened(processors=[evens])
    prompt = _prompts(1, seed=13)[0]
    found = finish(core, [request("a", prompt), request("b", prompt, replace(GREEDY, extra_args={"even": True}))])
    assert found["a"].tokens == _greedy(model, prompt)
    assert all(t % 2 == 0 for t in found["b"].tokens)
    assert [n for id, n in seen if id == "a"] == list(range(24))


def test_structured_outputs(opened: Open, checkpoint: Path) -> None:
    """A model of random weights writes documents of the schema, beside requests without one, while one is aborted."""
    from graphllm.config.requests.sampling_params import StructuredOutputsParams
    from graphllm.engine.requests.text import Tokenizer

    tokenizer = Tokenizer.from_folder(checkpoint)
    schema = {
        "type": "object", "required": ["a", "b"], "additionalProperties": False,
        "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
    }  # fmt: skip
    eos = sorted(tokenizer.stop_ids)
    core = opened(stop_ids=tuple(eos))
    grammar = StructuredOutputsParams(json=schema)
    picked = StructuredOutputsParams(choice=["red", "green"])
    free = SamplingParams(temperature=1.0, max_tokens=60, structured_outputs=grammar)
    wanted = [
        *(request(f"json{i}", [5 + i], free, seed=i, stop_ids=eos) for i in range(6)),
        request("compact", [9], replace(free, temperature=0.0, structured_outputs=StructuredOutputsParams(
            json=schema, disable_any_whitespace=True)), stop_ids=eos),
        request("choice", [9, 9], replace(free, structured_outputs=picked, min_tokens=50, logprobs=1), stop_ids=eos),
        request("ignored", [7], replace(free, structured_outputs=picked, ignore_eos=True)),
        request("plain", [5, 6, 7]),
        request("gone", [5, 6], free, stop_ids=eos),
    ]  # fmt: skip
    found = finish(core, wanted, lambda step: core.abort(["gone"] if step == 4 else []))
    texts = {id: tokenizer.decode(r.tokens) for id, r in found.items()}
    ended = [id for id in texts if id.startswith("json") and found[id].finish_reason == "stop"]
    assert ended
    for id in [*ended, "compact"]:
        document = json.loads(texts[id])
        assert set(document) == {"a", "b"}
        assert document["a"] in ("x", "yes")
        assert document["b"] in (True, False)
    assert texts["choice"] in ("red", "green")
    assert texts["ignored"] in ("red", "green")
    assert found["ignored"].finish_reason == "stop"
    assert found["plain"].tokens == finish(core, [request("plain", [5, 6, 7])])["plain"].tokens
    assert not core.part(Grammars).constraints.count
    wrong = StructuredOutputsParams(json={"type": "object", "propertyNames": {"maxLength": 3}})
    refused = finish(core, [request("x", [5], replace(free, structured_outputs=wrong))])["x"]
    assert refused.finish_reason == "error"
    assert "propertyNames" in str(refused.error)


def test_windows_have_pages_of_their_own(opened: Open, tmp_path: Path) -> None:
    """Sliding-window layers beside full ones: tokens of transformers, pages behind the window given back."""
    from transformers import Gemma2Config

    torch.manual_seed(1)
    kinds = ["sliding_attention", "full_attention"] * 2
    made = AutoModelForCausalLM.from_config(
        Gemma2Config(
            vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=16, layer_types=kinds,
            initializer_range=0.3, query_pre_attn_scalar=8, eos_token_id=1, bos_token_id=0, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    made.save_pretrained(tmp_path / "gemma")
    sizes = {"max_model_len": 200, "block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    place = artifact_of(tmp_path / "gemma", backend="eager", **sizes)
    params = replace(GREEDY, max_tokens=50)
    prompts = _prompts(6, seed=17, longest=120)
    expected = [_greedy(made, p, 50) for p in prompts]
    roomy = opened(folder=tmp_path / "gemma", place=place, pages=400)
    for turn in range(2):
        found = finish(roomy, [request(str(i), p, params) for i, p in enumerate(prompts)])
        assert [found[str(i)].tokens for i in range(6)] == expected
        if turn:
            assert all(found[str(i)].cached == (len(p) - 1) // 8 * 8 for i, p in enumerate(prompts))
    # 170 tokens are 22 pages for the full layers; the window of 16 and a step of 32 tokens are at most 8 more.
    tight = opened(folder=tmp_path / "gemma", place=place, pages=1 + 22 + 8)
    found = finish(tight, [request(str(i), p, params) for i, p in enumerate(prompts)])
    assert [found[str(i)].tokens for i in range(6)] == expected


def test_a_full_queue(opened: Open) -> None:
    core = opened(max_num_queued_reqs=2)
    for i in range(2):
        core.add(request(str(i), [5]))
    with pytest.raises(ConfigError, match="queue"):
        core.add(request("2", [5]))
    core.abort(["0"])
    ended = {u.id: u.finish_reason for _ in range(40) for u in core.step() if u.finish_reason}
    assert ended == {"0": "abort", "1": "length"}


def _padded_as_on_a_gpu(executor: Executor, step: StepInput) -> Size:
    most = executor.max_num_seqs
    return pick(executor.buckets, step.tokens, step.sequences, step.rows, step.query_len, most, exact=False)


def test_steps_are_measured(opened: Open, monkeypatch: Any) -> None:
    """By bucket: the seconds are those in which any step was in flight, the tokens those computed and padded."""
    core = opened()
    executor = core.executor
    monkeypatch.setattr(GraphPrograms, "pick", lambda graph, step: _padded_as_on_a_gpu(executor, step))
    called = 0.0  # when the current call of step() began
    surely: list[tuple[float, float]] = []  # in flight, of each step
    maybe: list[tuple[float, float]] = []  # with all of the calls that began and ended it
    expected = {b.name: [0, 0, 0] for b in executor.buckets}
    start, wait = executor.start, StepHandle.wait

    def started(step: Any, program: str) -> StepHandle:
        begun = time.monotonic()
        frame = start(step, program)
        frame.begun = (begun, called)  # type: ignore[attr-defined]
        bucket, tokens, padded = frame.size.bucket, step.tokens, frame.size.T
        expected[bucket.name] = [
            a + b for a, b in zip(expected[bucket.name], (1, tokens, padded - tokens), strict=True)
        ]
        return frame

    def waited(frame: Any) -> Any:
        result = wait(frame)
        surely.append((frame.begun[0], time.monotonic()))
        ended.append(frame.begun[1])
        return result

    monkeypatch.setattr(executor, "start", started)
    monkeypatch.setattr(StepHandle, "wait", waited)
    for turn in range(2):
        for i, prompt in enumerate(_prompts(7, seed=turn)):
            core.add(request(f"{turn}-{i}", prompt, replace(GREEDY, max_tokens=5, logprobs=1 if i == 3 else None)))
        while core.unfinished:
            called, ended = time.monotonic(), []
            core.step()
            maybe += [(begun, time.monotonic()) for begun in ended]
        gc.collect()  # takes a while, which is no step's time
    stats = core.stats()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=CoreStats) == stats
    found = {name: [sum(b.seconds.counts), b.tokens, b.padding] for name, b in stats.buckets.items()}
    assert found == expected
    assert min(found["mixed-2-32"][2], found["decode-2-4"][2]) > 0
    assert sum(stats.step_tokens.counts) == stats.steps == len(surely)
    assert stats.step_tokens.total == sum(tokens for _, tokens, _ in found.values())
    seconds = sum(b.seconds.total for b in stats.buckets.values())
    assert _covered(surely) <= seconds <= _covered(maybe)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, 0.0
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return total


def test_when_requests_were_scheduled(opened: Open, block_size: int, monkeypatch: Any) -> None:
    """Told with a request's first update alone, and it is the first time, also for one that was preempted since."""
    core = opened(pages=1 + 104 // block_size)
    prompts = _prompts(12, seed=4, longest=60)
    called, ids = 0.0, [str(i) for i in range(12)]
    between: dict[str, list[tuple[float, float]]] = defaultdict(list)  # each time it was given a slot
    told: dict[str, list[float]] = {id: [] for id in ids}
    starts: dict[str, int] = {}  # until its first token
    admitted: list[str] = []
    plan_next, start = core.scheduler.next, core.executor.start

    def planned() -> SchedulerOutput | None:
        plan = plan_next()
        if plan is not None:
            admitted.extend(sequence.request.id for sequence in plan.admitted)
        return plan

    def started(*given: Any, **named: Any) -> Any:
        for id in admitted:
            between[id].append((called, time.monotonic()))
        admitted.clear()
        return start(*given, **named)

    monkeypatch.setattr(core.scheduler, "next", planned)
    monkeypatch.setattr(core.executor, "start", started)
    for id, prompt in zip(ids, prompts, strict=True):
        core.add(request(id, prompt, replace(GREEDY, max_tokens=40)))
    while core.unfinished:
        called = time.monotonic()
        for update in core.step():
            starts.setdefault(update.id, len(between[update.id]))
            told[update.id].append(update.scheduled)
    assert max(starts.values()) > 1
    for id in ids:
        (begun, ended), (first, *others) = between[id][0], told[id]
        assert begun <= first <= ended
        assert not any(others)
    stats = core.stats()
    assert stats.prompt_tokens == sum(map(len, prompts))
    cached = [finish(core, [request("x", list(range(5, 45)))])["x"].cached for _ in range(2)]
    after = core.stats()
    assert cached == [0, 32]
    assert (after.prompt_tokens - stats.prompt_tokens, after.cached_tokens - stats.cached_tokens) == (80, 32)


def test_empty_step(opened: Open) -> None:
    assert opened().step() == []


def test_result_harness_is_strict() -> None:
    """News after the end would go unnoticed otherwise."""
    from graphllm.engine.requests.request import EngineCoreOutput

    result = Result(finish_reason="stop")
    with pytest.raises(AssertionError):
        result.take(EngineCoreOutput("x", [1]))
