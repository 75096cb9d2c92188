"""Verification of drafted tokens through the executor: right, half right or wrong, drafts change the number of steps
and nothing else, whatever states the layers keep."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import GREEDY, finish, open_core, request
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from graphllm.compile.pipeline import compile_model
from graphllm.config import EngineArgs
from graphllm.config.sampling import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.entrypoints.resolve import compile_config
from graphllm.entrypoints.source import open_source
from graphllm.runtime.staging import StepInput

COUNT = 24


@pytest.fixture(scope="module")
def engine_args() -> EngineArgs:
    return EngineArgs(
        target="cpu", backend="eager", dtype="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=32,
        block_size=8, num_speculative_tokens=3,
    )  # fmt: skip


def _compile(folder: Path, place: Path, wanted: EngineArgs) -> Path:
    source = open_source(folder)
    return compile_model(source.config, source.tensors, compile_config(source.config, wanted), place)


def _prompts(vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, vocab) for _ in range(rng.randint(1, 40))] for _ in range(9)]


def _run(
    core: EngineCore, prompts: list[list[int]], expected: list[list[int]], right: float, params: Any = GREEDY
) -> tuple[list[list[int]], list[int]]:
    """What each prompt gets, and the query length of each step. right: how likely a draft is right."""
    rng, lengths, start = random.Random(0), [], core._executor.start

    def record(step: StepInput, program: str) -> Any:
        lengths.append(step.query_len)
        return start(step, program)

    def propose(number: int) -> None:
        for state in core._scheduler.requests.by_slot:
            if state is not None:
                known = len(state.output)
                drafts = [t if rng.random() < right else (t + 1) % 90 for t in expected[int(state.request.id)][known:]]
                core._scheduler.propose(state, drafts[:8])

    core._executor.start = record  # type: ignore[method-assign]
    found = finish(core, [request(str(i), p, params) for i, p in enumerate(prompts)], propose)
    core._executor.start = start  # type: ignore[method-assign]
    return [found[str(i)].tokens for i in range(len(prompts))], lengths


@pytest.fixture(scope="module")
def llama(checkpoint: Path, engine_args: EngineArgs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    place = _compile(checkpoint, tmp_path_factory.mktemp("llama") / "artifact", engine_args)
    core = open_core(checkpoint, place, pages=100)
    yield core
    core.close()


@pytest.mark.parametrize("right", [1.0, 0.8, 0.0])
def test_drafts_change_nothing_but_the_number_of_steps(llama: EngineCore, checkpoint: Path, right: float) -> None:
    import torch

    model, prompts = LlamaForCausalLM.from_pretrained(checkpoint).eval(), _prompts(311, 1)
    expected = [
        model.generate(
            torch.tensor([p]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(p) :].tolist()
        for p in prompts
    ]  # fmt: skip
    llama.reset_prefix_cache()
    found, lengths = _run(llama, prompts, expected, right)
    assert found == expected
    assert 4 in lengths
    if right == 1.0:
        assert len(lengths) < 0.7 * len(_run(llama, prompts, [[]] * len(prompts), right)[1])


def test_sampled_tokens_are_the_same_with_drafts(llama: EngineCore) -> None:
    """Each row has its own random numbers, so verification keeps what would have been sampled one by one."""
    prompts, params = _prompts(311, 2), SamplingParams(temperature=1.5, seed=7, max_tokens=COUNT, ignore_eos=True)
    alone, lengths = _run(llama, prompts, [[]] * len(prompts), 1.0, params)
    assert max(lengths) == 1
    found, lengths = _run(llama, prompts, alone, 0.8, params)
    assert found == alone
    assert 4 in lengths


@pytest.mark.slow
def test_compiled_verification(checkpoint: Path, engine_args: EngineArgs, tmp_path: Path) -> None:
    place = _compile(checkpoint, tmp_path / "artifact", replace(engine_args, backend="inductor"))
    core, prompts = open_core(checkpoint, place, pages=100), _prompts(311, 1)
    alone, lengths = _run(core, prompts, [[]] * len(prompts), 1.0)
    assert max(lengths) == 1
    core.reset_prefix_cache()
    found, lengths = _run(core, prompts, alone, 0.8)
    core.close()
    assert found == alone
    assert 4 in lengths


@pytest.fixture(scope="module")
def unlike(engine_args: EngineArgs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineCore]]:
    import unlike_layers as family

    from graphllm.ir import model

    family.register()
    folder = tmp_path_factory.mktemp("unlike")
    (folder / "config.json").write_text(json.dumps(family.HF))
    save_file(family.checkpoint(), folder / "model.safetensors")
    place = _compile(folder, folder / "artifact", engine_args)
    cores = []

    def open_one(**options: Any) -> EngineCore:
        cores.append(open_core(folder, place, pages=60, **options))
        return cores[-1]

    yield open_one
    for core in cores:
        core.close()
    ops = sys.modules["graphllm.ir.op"]._ops
    del model._models["UnlikeLayersForCausalLM"], ops["unlike_recurrent"], ops["unlike_latent"]
    del sys.modules["unlike_layers"]


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_unlike_states_are_rolled_back(unlike: Callable[..., EngineCore], right: float) -> None:
    """Two recurrent states of unlike dtypes, int8 latents with scales and a window, whatever the drafts are."""
    import unlike_layers as family

    core, weights, prompts = unlike(), family.checkpoint(), _prompts(family.V, 3)
    expected = [family.greedy(weights, p, COUNT) for p in prompts]
    found, lengths = _run(core, prompts, expected, right)
    assert found == expected
    assert 4 in lengths


def test_a_prefix_of_unlike_states_is_found_again(unlike: Callable[..., EngineCore]) -> None:
    """A second prompt that begins as the first goes on from its blocks and a snapshot of its recurrent states."""
    import unlike_layers as family

    core, weights = unlike(), family.checkpoint()
    prompt = [1 + i % 90 for i in range(66)]
    for turn, tail in enumerate([[3, 4], [5]]):
        found = finish(core, [request("0", prompt + tail)])["0"]
        assert found.tokens == family.greedy(weights, prompt + tail, COUNT)
        assert found.cached == (64 if turn else 0)


def test_unlike_states_go_to_another_engine(unlike: Callable[..., EngineCore]) -> None:
    """Blocks and the snapshot of a sequence, under digests that both know; the second computes only what is behind."""
    import unlike_layers as family

    first, second = unlike(cache_secret="s"), unlike(cache_secret="s")
    wanted = request("0", [1 + i % 90 for i in range(66)])
    expected = family.greedy(family.checkpoint(), wanted.prompt, COUNT)
    assert finish(first, [wanted])["0"].tokens == expected
    entries = first.export_cache(wanted)
    assert {e.group for e in entries} == {0, 1, -1}
    assert second.import_cache(entries) == len(entries)
    found = finish(second, [wanted])["0"]
    assert (found.tokens, found.cached) == (expected, 64)


def test_unlike_states_share_one_pool(unlike: Callable[..., EngineCore]) -> None:
    """Blocks of unlike layers take equal bytes, so that one pool serves all; prompts in chunks, without drafts."""
    import unlike_layers as family

    core, weights = unlike(), family.checkpoint()
    assert len({(g.retention, g.block_size) for g in core._executor.layout.groups}) > 1
    prompt = [1 + i % 90 for i in range(70)]
    assert finish(core, [request("0", prompt)])["0"].tokens == family.greedy(weights, prompt, COUNT)
