"""The embedded models through the engine give transformers' greedy text: any batch, any chunks, cached or preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.embedded import MODEL_DIR, MOE_DIR
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
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for question in questions:
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=sorted(tokenizer.stop_ids)
        )
        found[tuple(prompt)] = out[0, len(prompt) :].tolist()
    return found


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


@pytest.mark.thorough
def test_greedy_of_experts() -> None:
    """The one whose tokens go to 2 of 8 experts."""
    place = artifact_of(MOE_DIR, **SIZES)
    questions = [f"What is {a} + {b}?" for a in (12, 31) for b in (7, 58)]
    questions += ["What is the capital of France?", "Spell cherry.", "Who are you?", "Sort these words: plum apple fig"]
    expected = _answers(MOE_DIR, questions)
    stops = sorted(Tokenizer.from_folder(MOE_DIR).stop_ids)
    core = open_core(MOE_DIR, place, pages=400, long_prefill_token_threshold=5)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    try:
        found = finish(core, [request(str(i), p, params, stop_ids=stops) for i, p in enumerate(expected)])
    finally:
        core.close()
    assert [found[str(i)].tokens for i in range(len(questions))] == list(expected.values())
