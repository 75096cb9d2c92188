"""The engine on a tiny random model: what is batched, chunked or stopped does not change what a request gets."""

from __future__ import annotations

import functools
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from graphllm import artifact, prepare
from graphllm.config import ConfigError
from graphllm.engine.engine import Engine, Output
from graphllm.engine.params import SamplingParams

PROMPTS = [
    "hello world",
    "the cat",
    "what is the answer to the question of the cat on the mat and of words",
    "a",
    "row in a list",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
Make = Callable[..., Engine]


@pytest.fixture
def make(eager_artifact: Path, checkpoint: Path) -> Make:
    """make(pages=48, folder=..., place=...): an engine with a cache of that many pages."""

    def engine(pages: int = 48, folder: Path = checkpoint, place: Path = eager_artifact) -> Engine:
        manifest = artifact.verify(place)
        source = prepare.open_source(folder)
        return prepare.load_engine(source, place, manifest, kv_memory=pages * manifest["memory"]["kv page"])

    return engine


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()


def _tokens(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.encode(text)


def _finish(engine: Engine, wanted: Iterable[tuple[list[int], SamplingParams]]) -> list[Output]:
    """The last output of each request, in their order; checks what holds for every stream of outputs."""
    names = [engine.add(prompt, params) for prompt, params in wanted]
    last: dict[str, Output] = {}
    sent = dict.fromkeys(names, "")
    for output in engine.run():
        before = last.get(output.id)
        assert before is None or before.finish_reason is None
        assert len(output.token_ids) == (len(before.token_ids) if before else 0) + 1
        sent[output.id] += output.delta
        last[output.id] = output
        assert output.text.startswith(sent[output.id])
    assert engine.unfinished == 0
    assert engine._scheduler.free_pages == engine._executor.kv_pages
    for name in names:
        assert last[name].finish_reason is not None
        assert sent[name] == last[name].text
    return [last[name] for name in names]


def _alone(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> Output:
    (output,) = _finish(engine, [(prompt, params)])
    return output


def test_greedy_is_what_transformers_gives(engine: Engine, checkpoint: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    outputs = _finish(engine, [(_tokens(engine, p), GREEDY) for p in PROMPTS])
    for text, output in zip(PROMPTS, outputs, strict=True):
        prompt = torch.tensor([_tokens(engine, text)])
        expected = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
        assert output.token_ids == expected.tolist()
        assert output.text == engine.tokenizer.decode(output.token_ids)
        assert (output.finish_reason, output.prompt_tokens) == ("length", prompt.shape[1])


def test_batch_or_alone(engine: Engine) -> None:
    """More requests than sequences in a step, in another order, with other neighbours: the same tokens."""
    prompts = [_tokens(engine, p) for p in PROMPTS]
    alone = [_alone(engine, p).token_ids for p in prompts]
    for seed in range(3):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        outputs = _finish(engine, [(prompts[i], replace(GREEDY, max_tokens=24 - seed)) for i in order])
        assert [o.token_ids for o in outputs] == [alone[i][: 24 - seed] for i in order]


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 2), (1, 7), (3, 4)])
def test_chunked_or_whole(seqs: int, tokens: int, engine: Engine, make: Make, checkpoint: Path, tmp_path: Path) -> None:
    from graphllm.compile.pipeline import compile_model

    source = prepare.open_source(checkpoint)
    wanted = prepare.Overrides("cpu", "eager", max_num_seqs=seqs, max_num_tokens=tokens, page_size=4, max_model_len=96)
    config = prepare.compile_config(source.config, wanted)
    place = compile_model(source.config, source.tensors, config, tmp_path / "artifact")
    prompts = [_tokens(engine, p) for p in PROMPTS]
    assert max(map(len, prompts)) > 2 * tokens
    whole = _finish(engine, [(p, GREEDY) for p in prompts])
    chunked = _finish(make(place=place), [(p, GREEDY) for p in prompts])
    assert [o.token_ids for o in chunked] == [o.token_ids for o in whole]


def test_requests_that_come_and_go(engine: Engine) -> None:
    """Random arrivals and lengths, greedy and sampled together: each gets what it gets alone."""
    rng = random.Random(0)
    wanted = []
    for i in range(20):
        prompt = [rng.randrange(engine._executor.vocab) for _ in range(rng.choice([1, 2, 7, 30, 60]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.choice([1, 2, 9, 20]), ignore_eos=True
        )
        wanted.append((prompt, params))
    alone = [_alone(engine, *w) for w in wanted]
    done: dict[str, Output] = {}
    waiting = list(enumerate(wanted))
    while waiting or engine.unfinished:
        while waiting and rng.random() < 0.4:
            i, (prompt, params) = waiting.pop(0)
            engine.add(prompt, params, f"r{i}")
        done |= {o.id: o for o in engine.step()}
    assert [done[f"r{i}"].token_ids for i in range(20)] == [o.token_ids for o in alone]
    assert engine._scheduler.free_pages == engine._executor.kv_pages


def test_cache_for_one_sequence_at_a_time(make: Make) -> None:
    """Requests wait for pages, in order, and all of them finish."""
    engine = make(pages=5)
    prompts = [_tokens(engine, p)[:10] for p in PROMPTS]
    outputs = _finish(engine, [(p, GREEDY) for p in prompts])
    assert [o.token_ids for o in outputs] == [_alone(make(), p).token_ids for p in prompts]


# --- sampling


def test_seeds(engine: Engine) -> None:
    prompt = _tokens(engine, "the cat")

    def drawn(seed: int | None, n: int = 1) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
        return [o.token_ids for o in _finish(engine, [(prompt, params)] * n)]

    (one,) = drawn(1)
    assert drawn(1, 4) == [one] * 4
    assert drawn(2)[0] != one
    assert drawn(2**62)[0] != one
    assert drawn(-(2**63))[0] != one
    free = drawn(None, 4)
    assert len({tuple(t) for t in free}) == 4


def test_seed_does_not_depend_on_neighbours(engine: Engine) -> None:
    """Rows of different temperature, top-k and seed in one batch do not see each other's parameters."""
    prompt = _tokens(engine, "hello")
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=3, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.6, min_p=0.05, seed=-5, max_tokens=20, ignore_eos=True),
    ]
    together = _finish(engine, [(prompt, p) for p in params])
    for p, output in zip(params, together, strict=True):
        assert output.token_ids == _alone(engine, prompt, p).token_ids
    assert len({tuple(o.token_ids) for o in together}) == 4


def test_top_k_of_one_is_greedy(engine: Engine) -> None:
    prompt = _tokens(engine, "what is")
    certain = SamplingParams(temperature=2.0, top_k=1, max_tokens=24, ignore_eos=True)
    assert _alone(engine, prompt, certain).token_ids == _alone(engine, prompt).token_ids


# --- ends


def test_stop_string_across_tokens(engine: Engine) -> None:
    prompt = _tokens(engine, "the cat")
    full = _alone(engine, prompt)
    pieces = [engine.tokenizer.decode([t]) for t in full.token_ids]
    borders = [len("".join(pieces[:n])) for n in range(4, 20)]
    tried = 0
    for border in borders:
        stop = full.text[border - 1 : border + 2]
        if full.text.find(stop) != border - 1:
            continue
        output = _alone(engine, prompt, replace(GREEDY, stop=(stop,)))
        assert (output.text, output.finish_reason) == (full.text[: border - 1], "stop")
        assert len(output.token_ids) < len(full.token_ids)
        assert output.token_ids == full.token_ids[: len(output.token_ids)]
        tried += 1
    assert tried > 4, "choose another model: the text repeats itself"


@functools.cache
def _texts(engine: Engine) -> list[str]:
    """The text after each token of an unstopped run."""
    prompt = _tokens(engine, PROMPTS[1])
    detokenizer = engine.tokenizer.detokenizer(prompt)
    return list(itertools.accumulate(detokenizer.step([t]) for t in _alone(engine, prompt).token_ids))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_stop_strings(engine: Engine, data: st.DataObject) -> None:
    """Output ends with the token that completes a stop string, before the first found; almost-matches are given out."""
    prompt = _tokens(engine, PROMPTS[1])
    texts = _texts(engine)
    full = texts[-1]
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(full) - 1))
        part = full[start : start + data.draw(st.integers(1, 7))]
        stops.append(part + data.draw(st.sampled_from(["", "", "\x00"])))  # with \x00 it never comes
    output = _alone(engine, prompt, replace(GREEDY, stop=tuple(stops)))
    found = [(text, [at for s in stops if (at := text.find(s)) >= 0]) for text in texts]
    expected = next((text[: min(at)] for text, at in found if at), None)
    assert output.text == (full if expected is None else expected)
    assert output.finish_reason == ("length" if expected is None else "stop")


def test_stop_tokens(engine: Engine) -> None:
    prompt = _tokens(engine, "the cat")
    full = _alone(engine, prompt)
    token = full.token_ids[5]
    first = full.token_ids.index(token)
    output = _alone(engine, prompt, replace(GREEDY, stop_token_ids=(token,)))
    assert (output.token_ids, output.finish_reason) == (full.token_ids[: first + 1], "stop")
    assert output.text == engine.tokenizer.decode(full.token_ids[:first])
    shown = _alone(engine, prompt, replace(GREEDY, stop_token_ids=(token,), skip_special_tokens=False))
    assert shown.text == engine.tokenizer.decode(full.token_ids[: first + 1])


def test_end_of_sequence(engine: Engine, make: Make, checkpoint: Path, tmp_path: Path) -> None:
    """The checkpoint's own end token ends a request unless it is to be ignored."""
    prompt = _tokens(engine, "the cat")
    full = _alone(engine, prompt)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = [full.token_ids[4], 1]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    ending = make(folder=folder)
    at = full.token_ids.index(full.token_ids[4]) + 1
    output = _alone(ending, prompt)
    assert (output.token_ids, output.finish_reason) == (full.token_ids[:at], "stop")
    ignoring = _alone(ending, prompt, replace(GREEDY, ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == (full.token_ids, "length")


def test_end_of_the_context(engine: Engine) -> None:
    """Without max_tokens, or with more than fits, a request ends at the artifact's max_model_len of 96."""
    for length in (1, 50, 95):
        for limit in (None, 1000):
            output = _alone(engine, [7] * length, replace(GREEDY, max_tokens=limit, ignore_eos=True))
            assert (len(output.token_ids), output.finish_reason) == (96 - length, "length")


# --- requests that cannot run


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"request mine: prompt is empty; give at least one token"),
        (
            [1] * 96,
            r"request mine: prompt has 96 tokens, the context holds 96 .*shorten it or compile with a larger --max-",
        ),
        ([1, 2, 10**6], r"request mine: token id 1000000 is not in the vocabulary of \d+"),
        ([1, -1], r"request mine: token id -1 is not in the vocabulary"),
    ],
)
def test_prompts_that_cannot_run(prompt: list[int], message: str, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.add(prompt, GREEDY, "mine")
    assert engine.unfinished == 0
    engine.add([1], GREEDY, "mine")  # nothing of it was kept


def test_cache_too_small_for_the_request(make: Make) -> None:
    engine = make(pages=2)
    message = (
        r"request mine: 10 prompt tokens and up to 24 more need 5 cache pages of 8 tokens, there are 2; .*max_tokens"
    )
    with pytest.raises(ConfigError, match=message):
        engine.add([1] * 10, GREEDY, "mine")
    assert _alone(engine, [1] * 10, replace(GREEDY, max_tokens=6)).finish_reason == "length"


def test_cache_without_a_page(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"kv cache: 0\.0 MB left for it, one page needs .* raise --kv-cache-memory"):
        make(pages=0)


def test_ids(engine: Engine) -> None:
    engine.add([1, 2], GREEDY, "a")
    with pytest.raises(ConfigError, match="id: 'a' is already running; ids must be unique"):
        engine.add([1, 2], GREEDY, "a")
    list(engine.run())
    assert engine.add([1, 2], GREEDY, "a") == "a"  # free again


def test_idle_engine_does_nothing(engine: Engine) -> None:
    assert engine.step() == []
    assert list(engine.run()) == []


def test_random_weights(eager_artifact: Path, checkpoint: Path, tmp_path: Path) -> None:
    """--load-format dummy: no checkpoint, the same shapes, some text."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tmp_path / name)
    manifest: Any = artifact.verify(eager_artifact)
    engine = prepare.load_engine(prepare.open_source(tmp_path, random=True), eager_artifact, manifest, kv_memory=10**6)
    assert len(_alone(engine, [1, 2, 3], replace(GREEDY, ignore_eos=True)).token_ids) == 24
