"""Two stages on two GPUs of one host with two steps in flight: messages in order, the tokens of one GPU whatever runs
beside, and a stage that dies. A minute, of which compiling is half:

    python -m pytest -m gpu tests/gpu/test_stages_cuda.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm import LLM, SamplingParams
from tests.engine.watched_steps import watched_steps
from tests.gpu.several_gpus import check_dying

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
HERE = Path(__file__).parent
MANY = 80  # requests: more than stay together
OPTIONS: dict[str, Any] = {
    "target": "cuda", "dtype": "float32", "max_model_len": 96, "max_num_seqs": MANY, "max_num_batched_tokens": 128,
    "block_size": 16, "tune": False, "seed": 3, "kv_cache_memory_bytes": 1 << 28, "skip_tokenizer_init": True,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [7 * i % 290 + k for i in range(3 + 5 * k)]} for k in range(8)]
TOKENS = 24
NEAR = 0.01  # by how much log-probabilities may differ of tokens that rounding may swap


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all engines here find what the first one has compiled."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHLLM_CACHE", str(place))
        yield place


def _params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, **given})


DRAWN = _params(temperature=0.8, seed=4, presence_penalty=0.4)


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> dict[str, list[Any]]:
    """What one GPU says, each prompt alone: greedy tokens with the two likeliest at each place, and drawn ones."""
    with LLM(checkpoint, **OPTIONS) as llm:
        said = {
            name: [llm.generate(prompt, params)[0].outputs[0] for prompt in PROMPTS]
            for name, params in (("greedy", _params(logprobs=2)), ("drawn", DRAWN))
        }
    return said


@pytest.fixture(scope="module")
def two(one: dict[str, list[Any]], checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, pipeline_parallel_size=2, **OPTIONS) as llm:
        yield llm


def _differs_by_rounding(found: list[int], expected: Any) -> bool:
    """Whether the first other token was nearly as likely."""
    at = next(i for i, (a, b) in enumerate(zip(found, expected.token_ids, strict=True)) if a != b)
    ranked = {token: told.logprob for token, told in expected.logprobs[at].items()}
    return found[at] in ranked and abs(ranked[found[at]] - ranked[expected.token_ids[at]]) < NEAR


def _check(outputs: list[Any], expected: list[Any]) -> None:
    """Greedy tokens of many requests beside those of one GPU."""
    found = [list(o.outputs[0].token_ids) for o in outputs]
    wanted = [expected[i % len(PROMPTS)] for i in range(len(found))]
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != list(b.token_ids)]
    told = {i: (found[i], list(wanted[i].token_ids)) for i in wrong if not _differs_by_rounding(found[i], wanted[i])}
    assert not told, f"{len(told)} of {len(found)} requests have other tokens: {dict(list(told.items())[:3])}"
    assert len(wrong) <= len(found) // 4, f"{len(wrong)} of {len(found)} differ by rounding"


def test_messages_between_gpus(tmp_path: Path) -> None:
    words = [sys.executable, str(HERE.parent / "runtime" / "ranks" / "links_worker.py"), str(tmp_path / "meeting"), "2"]
    processes = [subprocess.Popen([*words, str(stage), "cuda"]) for stage in range(2)]
    try:
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def test_many_requests(one: dict[str, list[Any]], two: LLM) -> None:
    """Two steps in flight, of other requests each; the plain program and the one that stops at its logits."""
    with watched_steps(two.llm_engine.core) as steps:
        _check(two.generate(PROMPTS * (MANY // 8), _params()), one["greedy"])
    others = [len(plans) - 1 for plans in steps.overlaps]
    assert sum(others) > len(others) / 2, f"steps of other requests in flight with each: {others}"
    _check(two.generate(PROMPTS * (MANY // 8), _params()), one["greedy"])  # all graphs are captured now
    _check(two.generate(PROMPTS * (MANY // 8), _params(logprobs=2)), one["greedy"])


def test_few_requests(one: dict[str, list[Any]], two: LLM) -> None:
    """One step behind the other, the tokens of each fed to the next one on the device."""
    _check(two.generate(PROMPTS, _params()), one["greedy"])
    _check(two.generate(PROMPTS[2], _params()), one["greedy"][2:3])


def test_drawn_tokens(one: dict[str, list[Any]], two: LLM) -> None:
    """With states of the sampler, which are written between steps. Rounding may move a draw."""
    found = [o.outputs[0].token_ids for o in two.generate(PROMPTS * (MANY // 8), DRAWN)]
    expected = [one["drawn"][i % len(PROMPTS)].token_ids for i in range(len(found))]
    same = sum(list(a) == list(b) for a, b in zip(found, expected, strict=True))
    assert same >= 0.75 * len(found), f"{same} of {len(found)} are the same"


def test_a_stage_that_dies(two: LLM, checkpoint: Path) -> None:
    """With two steps in flight."""
    two.close()
    check_dying(checkpoint, OPTIONS | {"pipeline_parallel_size": 2})
