"""Engines whose layers are stages on ranks of their own, and also divided: the text and log-probabilities of
transformers, and whatever one process gives. The tests are those of ranks that divide matrices."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from graphllm import LLM, SamplingParams, StructuredOutputsParams
from graphllm.config import ConfigError
from graphllm.engine.parts.snapshots import Snapshots
from graphllm.program.linking import PieceCall
from graphllm.program.stages import Stage, stage_calls
from graphllm.runtime.ranks.rank_failure import RankError
from tests.checkpoints import random_checkpoint
from tests.engine.harness import request, verify_all_drafts
from tests.engine.ranks.test_ranks import (  # noqa: F401
    EAGER,
    GREEDY,
    TestTwoRanks,
    _step_for_ever,
    executor_of,
    one,
    options,
    pids_of,
    tolerance,
)
from tests.engine.watched_steps import watched_steps
from tests.tiers import thorough
from tests.waiting import gone, until


@pytest.fixture(scope="class")
def two(checkpoint: Path, options: dict[str, Any]) -> Iterator[LLM]:  # noqa: F811
    """A layer on each rank."""
    with LLM(checkpoint, pipeline_parallel_size=2, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose head is its embedding, with layers that two stages cannot share evenly."""
    sizes = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.15,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return random_checkpoint(tmp_path_factory.mktemp("three"), "Llama", 6, sizes)


PROMPT_IDS = [{"prompt_token_ids": [7 * i % 290 + k for i in range(9)]} for k in range(4)]


def _expected(folder: Path) -> list[list[int]]:
    """Greedy tokens of transformers."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPT_IDS:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        out = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=True)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.thorough
def test_stages_of_unequal_size_and_a_tied_head(three_layers: Path, options: dict[str, Any]) -> None:  # noqa: F811
    """Two layers on rank 0, one on rank 1, whose share of an exported block is as much smaller."""
    with LLM(three_layers, pipeline_parallel_size=2, skip_tokenizer_init=True, **options) as llm:
        assert [list(o.outputs[0].token_ids) for o in llm.generate(PROMPT_IDS, GREEDY)] == _expected(three_layers)
        core: Any = llm.llm_engine.core
        prompt = list(range(5, 6 + 2 * options["block_size"]))
        before = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
        entries = core.part(Snapshots).export_cache(request("export", prompt))
        assert {2 * len(e.data) for e in entries} == {3 * executor_of(llm).states.block_bytes}
        assert core.reset_prefix_cache()
        assert core.part(Snapshots).import_cache(entries) == 2
        again = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0]
        assert (again.num_cached_tokens, again.outputs[0].token_ids) == (2 * options["block_size"], before)


@pytest.mark.thorough
def test_stages_work_on_different_batches(three_layers: Path, options: dict[str, Any]) -> None:  # noqa: F811
    """While prompts and tokens of some requests are in one stage, those of others are in the other, never a token of
    the same request; few requests stay together. What is sampled is what transformers says."""
    options = {**options, "max_num_seqs": 40, "max_num_batched_tokens": 128}
    with LLM(three_layers, pipeline_parallel_size=2, skip_tokenizer_init=True, **options) as llm:
        expected = _expected(three_layers)
        with watched_steps(llm.llm_engine.core) as steps:
            assert [list(o.outputs[0].token_ids) for o in llm.generate(PROMPT_IDS * 10, GREEDY)] == expected * 10
        ids = [[{s.request.id for s in plan.requests} for plan in plans] for plans in steps.overlaps]
        pairs = [sets for sets in ids if len(sets) == 2]
        assert len(pairs) > len(steps.overlaps) / 2
        decoding = pairs[8:-4]  # a prompt may be in both stages, with a part in each
        assert all(not a & b for a, b in decoding)
        assert max(len(b) for _, b in decoding) == 20  # half of the forty
        with watched_steps(llm.llm_engine.core) as steps:
            assert [list(o.outputs[0].token_ids) for o in llm.generate(PROMPT_IDS, GREEDY)] == expected
        assert max(len(plans[-1].requests) for plans in steps.overlaps) == 4
        assert len(steps.overlaps) <= 13


CORPUS = ["hello world, the cat sat on the mat", "what is the answer to the question", "a list of words in a row"]
MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(choice=["the mat", "a row", "cats"])},
    {"temperature": 0.0, "logprobs": 2, "bad_words": ["cat", "the mat"]},
    {"temperature": 0.7, "seed": 5, "n": 2},
]


@pytest.mark.parametrize(
    "drafts",
    [
        thorough({}, id="none"),
        thorough({"num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}, id="lookup"),
        thorough({"num_speculative_tokens": 2, "draft_proposer": "suffix"}, id="suffix"),
    ],
)
def test_many_ways_of_sampling_at_once(checkpoint: Path, options: dict[str, Any], drafts: dict[str, Any]) -> None:  # noqa: F811
    """More requests than stay together, of every kind: what the host must know of a request before it goes on, states
    that are written between steps, blocks that are copied, and drafts. Each says what it says in one process."""
    options = {**options, **drafts, "max_num_seqs": 40, "max_num_batched_tokens": 128}
    prompts = [f"{CORPUS[i % 3]} {CORPUS[i % 2]} {'cat ' * (i % 4)}" for i in range(40)]
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **MIXED[i % len(MIXED)]) for i in range(40)]
    said = []
    for stages in (1, 2):
        with LLM(checkpoint, pipeline_parallel_size=stages, **options) as llm:
            if drafts:
                verify_all_drafts(llm.llm_engine.core)
            said.append([[c.text for c in o.outputs] for o in llm.generate(prompts, params)])
            if drafts:
                assert llm.llm_engine.core.stats().draft_tokens > 0
    assert said[0] == said[1]


@pytest.mark.parametrize("backend", [thorough("eager"), pytest.param("inductor", marks=pytest.mark.slow)])
def test_stages_whose_matrices_are_divided(three_layers: Path, backend: str) -> None:
    """Four processes: two stages of two ranks each; compiled as well. With requests in both stages, too, of which some
    have states written between steps: ranks of a stage must launch alike, or they would add up unlike things."""
    options = {**EAGER, "backend": backend, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}  # noqa: F811
    options |= {"max_num_seqs": 40, "max_num_batched_tokens": 128}
    expected, plain = _expected(three_layers), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    kinds = [GREEDY, plain, plain, SamplingParams(temperature=0.0, max_tokens=12, logit_bias={3: 0.0}, ignore_eos=True)]
    with LLM(three_layers, skip_tokenizer_init=True, **options) as llm:
        assert len(pids_of(llm)) == 3
        assert [list(o.outputs[0].token_ids) for o in llm.generate(PROMPT_IDS, GREEDY)] == expected
        for params in (plain, kinds * 10):
            found = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPT_IDS * 10, params)]
            assert found == expected * 10


@pytest.mark.slow
def test_three_stages(three_layers: Path, options: dict[str, Any]) -> None:  # noqa: F811
    """With three steps in flight, of the rows that there are."""
    with LLM(three_layers, pipeline_parallel_size=3, skip_tokenizer_init=True, **options) as llm:
        assert [list(o.outputs[0].token_ids) for o in llm.generate(PROMPT_IDS, GREEDY)] == _expected(three_layers)
        drawn = SamplingParams(temperature=0.8, seed=4, presence_penalty=0.4, max_tokens=10, ignore_eos=True)
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPT_IDS, drawn)]
    with LLM(three_layers, skip_tokenizer_init=True, **options) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPT_IDS, drawn)] == found


def test_a_stage_that_dies(three_layers: Path, options: dict[str, Any]) -> None:  # noqa: F811
    """While steps are in both stages: the engine is told which one, at once, and no process stays."""
    options = {**options, "max_num_seqs": 40, "max_num_batched_tokens": 128}
    with LLM(three_layers, pipeline_parallel_size=2, skip_tokenizer_init=True, **options) as llm:
        (pid,) = pids_of(llm)
        for number, prompt in enumerate(PROMPT_IDS * 10):
            llm.llm_engine.add_request(f"{number}", prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        with watched_steps(llm.llm_engine.core) as steps:
            for _ in range(12):
                llm.llm_engine.step()
        assert len(steps.in_flight) == 2
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=rf"rank 1 of 2 \(process {pid}\) was killed by signal 9"):
            _step_for_ever(llm)
    until(lambda: gone(pid))


def test_what_cannot_have_stages(checkpoint: Path, options: dict[str, Any]) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 3: the model has 2 layers; give at most as many"):
        LLM(checkpoint, pipeline_parallel_size=3, **options)


def test_what_a_stage_calls() -> None:
    """Each call is made once, but for what follows the layers; what later ones read goes on, once for each border."""

    def call(inputs: list[str], outputs: list[str]) -> PieceCall:
        local = {name: f"l{i}" for i, name in enumerate([*inputs, *outputs])}
        code = [["empty", local[n], [1], [1], "float32"] for n in outputs]
        code += [["kernel", "k", [["t", n] for n in local.values()]]]
        bundle = {"inputs": [local[n] for n in inputs], "outputs": [local[n] for n in outputs], "code": code}
        return PieceCall(bundle, inputs, outputs)

    calls = [
        call(["step.token_ids", "embed.tokens"], ["x", "angles"]),
        call(["x", "angles", "layers.0.w", "state.layers.0.kv"], ["y"]),
        call(["y", "angles", "layers.1.w"], ["z"]),
        call(["z", "layers.2.w", "head.w"], ["logits"]),
        call(["logits"], ["tokens"]),
    ]
    made = [stage_calls(calls, ["tokens", "logits"], Stage(number, 3)) for number in range(3)]
    kernels = [[any(c[0] == "kernel" for c in m.bundle["code"]) for m in stage] for stage in made]
    assert kernels == [[1, 1, 0, 0, 1], [0, 0, 1, 0, 1], [0, 0, 0, 1, 1]]

    def moved(stage: list[PieceCall]) -> list[tuple[int | str, ...]]:
        found = []
        for at, m in enumerate(stage):
            names = dict(zip([*m.bundle["inputs"], *m.bundle["outputs"]], [*m.inputs, *m.outputs], strict=True))
            for _, name, (stages, other, *values) in (c for c in m.bundle["code"] if c[0] == "message"):
                assert stages == 3
                found.append((at, name, other, *(names[local] for _, local in values)))
        return found

    assert moved(made[0]) == [(1, "send_to_stage", 1, "angles", "y"), (3, "receive_from_stage", 2, "logits")]
    assert moved(made[1]) == [
        (1, "receive_from_stage", 0, "angles", "y"), (2, "send_to_stage", 2, "z"),
        (3, "receive_from_stage", 2, "logits"),
    ]  # fmt: skip
    assert moved(made[2]) == [(2, "receive_from_stage", 1, "z"), (3, "send_to_stages", 2, "logits")]
