"""The embedded models through the engine give transformers' greedy text: any batch, any chunks, cached or preempted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.training.evaluate import held_out
from bench.training.tasks import TASKS
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.embedded import HYBRID_DIR, MODEL_DIR, MOE_DIR
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.requests.text import Tokenizer
from tests.artifacts import artifact_of
from tests.engine.harness import finish, open_core, request

pytestmark = pytest.mark.thorough
TOKENS = 32


SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 64, "block_size": 8}


@pytest.fixture(scope="module")
def place() -> Path:
    return artifact_of(MODEL_DIR, **SIZES)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """64 prompts, and what transformers makes of them."""
    questions = [f"What is {a} + {b}?" for a in range(11, 19) for b in (7, 23, 58, 99)]
    fruit = ("fig", "kiwi", "lemon", "mango", "olive", "pear", "plum", "nut")
    questions += [f"Sort these words: {w} banana apple {w} cherry" for w in fruit]
    questions += [f"Reverse the string {'abcdefgh'[i:] * 4}" for i in range(8)]
    questions += [f"How many letters are in {'word' * i}?" for i in range(1, 17)]
    found = _answers(MODEL_DIR, questions)
    assert len(found) == 64
    return found


def _answers(folder: Path, questions: list[str]) -> dict[tuple[int, ...], list[int]]:
    """By prompt, what transformers makes of it, end-of-sequence token and what comes after it not counted."""
    tokenizer = Tokenizer.from_folder(folder)
    return _continued(folder, [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in questions])


def _continued(folder: Path, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    from transformers import AutoModelForCausalLM

    stops = sorted(Tokenizer.from_folder(folder).stop_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=stops)
        found[tuple(prompt)] = out[0, len(prompt) :].tolist()
    return found


def _asked(folder: Path, id: str, prompt: Sequence[int], tokens: int = TOKENS) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    return request(id, prompt, params, stop_ids=sorted(Tokenizer.from_folder(folder).stop_ids))


@pytest.mark.parametrize("chunk", [0, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_greedy(batch: int, chunk: int, place: Path, expected: dict[tuple[int, ...], list[int]]) -> None:
    """Cold, then from a warm prefix cache with real hits."""
    stops = sorted(Tokenizer.from_folder(MODEL_DIR).stop_ids)
    core = open_core(MODEL_DIR, place, pages=2000, long_prefill_token_threshold=chunk)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    prompts = list(expected)
    try:
        for warm in (False, True):
            for at in range(0, len(prompts), batch):
                part = prompts[at : at + batch]
                found = finish(core, [request(str(i), p, params, stop_ids=stops) for i, p in enumerate(part)])
                for i, prompt in enumerate(part):
                    assert found[str(i)].tokens == expected[prompt]
                    if warm:
                        assert found[str(i)].cached == (len(prompt) - 1) // 8 * 8
        assert core.stats().prefix_hits > 64 * 16
    finally:
        core.close()


def test_greedy_while_preempted(place: Path, expected: dict[tuple[int, ...], list[int]]) -> None:
    stops = sorted(Tokenizer.from_folder(MODEL_DIR).stop_ids)
    core = open_core(MODEL_DIR, place, pages=40)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    try:
        found = finish(core, [request(str(i), p, params, stop_ids=stops) for i, p in enumerate(expected)])
        assert core.stats().preemptions > 10
    finally:
        core.close()
    assert [found[str(i)].tokens for i in range(len(expected))] == list(expected.values())


@pytest.mark.parametrize("folder", [MOE_DIR, HYBRID_DIR], ids=lambda folder: folder.name)
def test_greedy_of_siblings(folder: Path) -> None:
    """The one whose tokens go to 2 of 8 experts, and the one with recurrent layers."""
    questions = [f"What is {a} + {b}?" for a in (12, 31) for b in (7, 58)]
    questions += ["What is the capital of France?", "Spell cherry.", "Who are you?", "Sort these words: plum apple fig"]
    expected = _answers(folder, questions)
    core = open_core(folder, artifact_of(folder, **SIZES), pages=400, long_prefill_token_threshold=5)
    try:
        found = finish(core, [_asked(folder, str(i), p) for i, p in enumerate(expected)])
    finally:
        core.close()
    assert [found[str(i)].tokens for i in range(len(questions))] == list(expected.values())


def test_a_conversation_goes_on_from_its_states() -> None:
    """The second turn of a conversation finds the states that the first one's prompt has left, and is answered as
    transformers answers it as a whole."""
    tokenizer = Tokenizer.from_folder(HYBRID_DIR)
    turns = [{"role": "user", "content": "My name is Anna."}]
    core = open_core(HYBRID_DIR, artifact_of(HYBRID_DIR, **SIZES), pages=400)
    try:
        first = tokenizer.encode_chat(turns)
        answer = finish(core, [_asked(HYBRID_DIR, "first", first)])["first"]
        turns += [{"role": "assistant", "content": "Nice to meet you, Anna!"}]
        turns += [{"role": "user", "content": "What is my name?"}]
        second = tokenizer.encode_chat(turns)
        found = finish(core, [_asked(HYBRID_DIR, "second", second)])["second"]
    finally:
        core.close()
    assert [answer.tokens, found.tokens] == list(_continued(HYBRID_DIR, [first, second]).values())
    assert answer.cached == 0
    assert found.cached == (len(first) - 1) // SIZES["block_size"] * SIZES["block_size"]


def test_the_recurrent_one_answers_as_well() -> None:
    """Of held-out questions of every task, at least nine tenths of those that the Llama answers."""
    samples = [sample for name in TASKS for sample in held_out(name, 4, 2)]
    right = {}
    for folder in (MODEL_DIR, HYBRID_DIR):
        tokenizer = Tokenizer.from_folder(folder)
        prompts = [tokenizer.encode_chat(s.messages, tools=s.tools or None) for s in samples]
        core = open_core(folder, artifact_of(folder, **{**SIZES, "max_model_len": 1024}), pages=4000)
        try:
            found = finish(core, [_asked(folder, str(i), p, 320) for i, p in enumerate(prompts)])
        finally:
            core.close()
        said = [tokenizer.decode(found[str(i)].tokens) for i in range(len(samples))]
        right[folder] = sum(sample.accepts(text) for sample, text in zip(samples, said, strict=True))
    assert right[MODEL_DIR] > 0.95 * len(samples)
    assert right[HYBRID_DIR] >= 0.9 * right[MODEL_DIR]
