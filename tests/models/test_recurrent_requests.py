"""Families with recurrent layers, with caches of latents and with ALiBi, and older decoders, through `LLM`, beside
transformers: greedy tokens and the chance of each, where requests share slots, steps and prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from graphllm import LLM, SamplingParams
from tests.models import test_parity as parity
from tests.tiers import ON_GPU

V, N_TOKENS, CACHE = parity.V, 12, 8 << 20
NAMES: dict[str, Any] = {
    "mamba2": (), "granite_hybrid": (), "deepseek_v3": (), "glm_moe_dsa_shared": pytest.mark.thorough,
    "kimi_linear": pytest.mark.thorough,
    **dict.fromkeys(
        ("bloom", "gptj", "codegen", "gpt_neo", "falcon_grouped", "falcon_alibi", "mpt"), pytest.mark.thorough
    ),
}  # fmt: skip


@torch.no_grad()
def checked(model: torch.nn.Module, prompt: Sequence[int], output: Any, greedy: bool = True) -> None:
    """An output's tokens have the chances that transformers gives them; greedy: and are those that it chooses."""
    tokens = list(output.token_ids)
    assert len(tokens) == N_TOKENS
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    expected = torch.log_softmax(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double(), -1)
    if greedy:
        assert tokens == expected.argmax(-1).tolist()
    found = torch.tensor([chances[token].logprob for token, chances in zip(tokens, output.logprobs, strict=True)])
    torch.testing.assert_close(found.double(), expected[range(N_TOKENS), tokens], atol=2e-4, rtol=0)


def _settings(backend: str) -> dict[str, Any]:
    """Three slots, and steps of at most 16 tokens."""
    return {
        "target": "cuda" if ON_GPU else "cpu", "backend": backend, "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 16,
        "kv_cache_memory_bytes": CACHE,
    }  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((backend, name), id=f"{backend}-{name}", marks=marks or own)
        for backend, marks in (("eager", ()), ("prebuilt", pytest.mark.thorough), ("inductor", pytest.mark.slow))
        for name, own in NAMES.items()
    ],
)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    """A checkpoint's model of transformers, and an engine with three slots and steps of at most 16 tokens."""
    backend, name = request.param
    folder = tmp_path_factory.mktemp(name)
    model = parity.saved_oracle(next(arch for arch in parity.ARCHS if arch.name == name), folder)
    llm = LLM(str(folder), **_settings(backend))
    yield model, llm
    llm.close()


def outputs(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[Any]]:
    """The outputs of each prompt."""
    usual = {"temperature": 0, "max_tokens": N_TOKENS, "ignore_eos": True, "logprobs": 1}
    sampling = SamplingParams(**usual | params)
    made = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    return [list(output.outputs) for output in made]


def drawn(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]


def test_alone(asked: tuple[Any, LLM]) -> None:
    model, llm = asked
    for prompt in drawn(1, 1, 2, 3, 17):
        ((output,),) = outputs(llm, [prompt])
        checked(model, prompt, output)


def test_many_in_few_slots_and_again(asked: tuple[Any, LLM]) -> None:
    """More requests than slots, prompts in several steps, beside others that decode; then from the cache."""
    model, llm = asked
    prompts = drawn(2, 1, 62, 16, 33, 5, 48, 15, 64)
    first = outputs(llm, prompts)
    for prompt, (output,) in zip(prompts, first, strict=True):
        checked(model, prompt, output)
    assert len({t for (output,) in first for t in output.token_ids}) > 8, "the model repeats itself, which tests little"
    again = outputs(llm, prompts)
    assert [list(a.token_ids) for (a,) in again] == [list(f.token_ids) for (f,) in first]


def test_prompts_that_begin_alike(asked: tuple[Any, LLM]) -> None:
    """At each boundary of a block and beside it."""
    model, llm = asked
    (shared, *rests) = drawn(3, 64, 5, 9, 1, 20)
    for cut in (15, 16, 17, 32, 48, 64):
        for rest in rests:
            prompt = shared[:cut] + rest
            ((output,),) = outputs(llm, [prompt])
            checked(model, prompt, output)


def test_several_answers_of_a_prompt(asked: tuple[Any, LLM]) -> None:
    model, llm = asked
    (prompt,) = drawn(4, 37)
    answers = outputs(llm, [prompt], n=3, temperature=1.0, seed=7)[0]
    for output in answers:
        checked(model, prompt, output, greedy=False)
    assert len({tuple(output.token_ids) for output in answers}) == 3
