"""An engine of several ranks gives the text of one process: `LLM` with tensor_parallel_size on CPUs, tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphllm import LLM, SamplingParams

PROMPTS = ["hello world, the cat", "what is the answer", "a list of words in a row", "hello"]
LIMITS = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
EAGER: dict[str, Any] = {"target": "cpu", "backend": "eager", "dtype": "float32", **LIMITS}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)


def _texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]


def test_two_ranks(checkpoint: Path) -> None:
    with LLM(checkpoint, **EAGER) as one:
        expected = _texts(one)
    with LLM(checkpoint, tensor_parallel_size=2, **EAGER) as two:
        assert _texts(two) == expected
