"""An engine of several ranks gives what one process gives: `LLM` with tensor_parallel_size on CPUs, tiny models."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphllm import LLM, SamplingParams, StructuredOutputsParams
from graphllm.config import ConfigError
from graphllm.engine.parts.snapshots import Snapshots
from graphllm.engine.requests.request import CacheEntry
from graphllm.runtime.commands.command import TensorData
from graphllm.runtime.ranks.multiproc_executor import MultiprocExecutor
from graphllm.runtime.ranks.rank_failure import RankError
from graphllm.runtime.ranks.rank_messages import Array, Start
from graphllm.runtime.ranks.rank_processes import RankProcesses
from tests.artifacts import LIMITS
from tests.engine.harness import request
from tests.engine.rank_functions import FillBlocks, SumOfBlock
from tests.waiting import gone, until

PROMPTS = ["hello world, the cat", "what is the answer", "a list of words in a row", "hello"]
EAGER: dict[str, Any] = {"target": "cpu", "backend": "eager", "dtype": "float32", "seed": 3, **LIMITS}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """Of every engine here; the tests on GPUs have others."""
    return EAGER


@pytest.fixture(scope="module")
def tolerance() -> float:
    """Of log-probabilities."""
    return 1e-4


def _make_unlikely(logits: torch.Tensor, rows: Any) -> None:
    """A logits processor that changes what is chosen: the likeliest token of a row becomes unlikely."""
    logits.scatter_(1, logits.argmax(dim=-1, keepdim=True), -100.0)


def executor_of(llm: LLM) -> MultiprocExecutor:
    found = llm.llm_engine.core.executor
    assert isinstance(found, MultiprocExecutor)
    return found


def pids_of(llm: LLM) -> list[int]:
    """Of the ranks' processes on this host."""
    return [pid for host in executor_of(llm).ranks.hosts if isinstance(host, RankProcesses) for pid in host.pids]


def _step_for_ever(llm: LLM) -> None:
    while True:
        llm.llm_engine.step()


@pytest.fixture(scope="class")
def one(checkpoint: Path, options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(checkpoint, **options) as llm:
        yield llm


@pytest.fixture(scope="class")
def two(checkpoint: Path, options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        yield llm


class TestTwoRanks:
    """One engine for all of these. A process has one of several ranks at a time."""

    def test_greedy_text_and_logprobs(self, checkpoint: Path, two: LLM, tolerance: float) -> None:
        """Beside transformers: its text, and its log-probabilities within 1e-4."""
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        for output in two.generate(PROMPTS, GREEDY):
            ids = list(output.prompt_token_ids)
            found = output.outputs[0]
            assert len(found.token_ids) == 12
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, *found.token_ids]])).logits[0, len(ids) - 1 : -1]
            assert logits.argmax(-1).tolist() == list(found.token_ids)
            expected = logits.log_softmax(-1)
            for row, ranked in zip(expected, found.logprobs, strict=True):
                for token, told in ranked.items():
                    assert told.logprob == pytest.approx(float(row[token]), abs=tolerance)

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 1.0, "seed": 11, "top_p": 0.9},
            {"temperature": 0.7, "seed": 5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 20},
            {"temperature": 0.0, "logit_bias": {70: 4.0, 80: -100.0}, "prompt_logprobs": 2},
            {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": [7, 300]},
            {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(choice=["the mat", "a row", "cats"])},
        ],
        ids=["seeded", "penalties", "bias", "named tokens", "choice"],
    )
    def test_ways_of_sampling(self, one: LLM, two: LLM, tolerance: float, params: dict[str, Any]) -> None:
        """The same as one process, whose own tests compare it with references."""
        wanted = SamplingParams(max_tokens=10, **params)
        for a, b in zip(one.generate(PROMPTS, wanted), two.generate(PROMPTS, wanted), strict=True):
            assert b.outputs[0].text == a.outputs[0].text
            assert b.outputs[0].finish_reason == a.outputs[0].finish_reason
            scores = [(a.outputs[0].logprobs, b.outputs[0].logprobs), (a.prompt_logprobs, b.prompt_logprobs)]
            for x, y in ((x, y) for pair in scores for x, y in zip(*(p or () for p in pair), strict=True)):
                assert sorted(x or ()) == sorted(y or ())
                for token, told in (x or {}).items():
                    assert y[token].logprob == pytest.approx(told.logprob, abs=tolerance)

    def test_a_cache_is_exported_and_imported(self, two: LLM, options: dict[str, Any]) -> None:
        """Blocks hold what all ranks have of them: what comes back in is found, and the text behind it is the same."""
        core: Any = two.llm_engine.core
        core.reset_prefix_cache()
        prompt = list(range(20, 21 + 4 * options["block_size"]))
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        before = two.generate({"prompt_token_ids": prompt}, greedy)[0]
        entries = core.part(Snapshots).export_cache(request("export", prompt))
        assert len(entries) == 4
        assert {len(e.data) for e in entries} == {2 * executor_of(two).states.block_bytes}
        assert core.reset_prefix_cache()
        with pytest.raises(ConfigError, match=r"imported block has 8 bytes, here it has"):
            core.part(Snapshots).import_cache([CacheEntry(0, b"other", entries[0].data[:8])])
        assert core.part(Snapshots).import_cache(entries) == 4
        after = two.generate({"prompt_token_ids": prompt}, greedy)[0]
        assert after.num_cached_tokens == 4 * options["block_size"]
        assert after.outputs[0].token_ids == before.outputs[0].token_ids

    def test_a_command_from_outside(self, two: LLM) -> None:
        """A mover of device state costs one struct: every rank runs it, and answers what is asked of it."""
        executor = executor_of(two)
        fill = FillBlocks([3, 5], np.array([1, 4], np.int16), TensorData(torch.tensor([2.5])))
        executor.do(fill)
        assert [a.value for a in executor.ask(SumOfBlock(3))] == [[0, 3.5], [1, 3.5]]
        assert [a.value for a in executor.ask(SumOfBlock(5))] == [[0, 6.5], [1, 6.5]]
        with pytest.raises(ConfigError, match="block 0 is nobody's"):
            executor.do(FillBlocks([0], fill.bytes, fill.more))
        assert two.generate(PROMPTS[0], GREEDY)[0].finished

    def test_each_rank_holds_its_share(self, one: LLM, two: LLM) -> None:
        whole: Any = one.llm_engine.core
        assert executor_of(two).states.block_bytes * 2 == whole.executor.states.block_bytes
        assert executor_of(two).layout.num_blocks == two.llm_engine.core.info.num_blocks


def test_a_rank_that_dies(checkpoint: Path, options: dict[str, Any]) -> None:
    """The engine is told which one, at once; nothing hangs, and no process stays."""
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        (pid,) = pids_of(llm)
        llm.llm_engine.add_request("long", PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(4):
            llm.llm_engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=rf"rank 1 of 2 \(process {pid}\) was killed by signal 9 \(SIGKILL\)"):
            _step_for_ever(llm)
    until(lambda: gone(pid))


@pytest.fixture(scope="module")
def four_heads(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with four heads of keys and values."""
    folder = tmp_path_factory.mktemp("four")
    torch.manual_seed(4)
    config = LlamaConfig.from_pretrained(checkpoint, num_key_value_heads=4)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.thorough
def test_four_ranks_with_a_logits_processor(four_heads: Path, options: dict[str, Any]) -> None:
    """The processor runs in this process; the other ranks get the logits that it leaves."""
    options = {**options, "logits_processors": [_make_unlikely]}
    with LLM(four_heads, **options) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    with LLM(four_heads, tensor_parallel_size=4, **options) as llm:
        pids = pids_of(llm)
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected
    assert len(pids) == 3
    until(lambda: gone(*pids))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_each_of_four_ranks_that_dies(four_heads: Path, options: dict[str, Any], victim: int) -> None:
    """It is the one that is named, not one of those that miss it: in its stage, or in the other."""
    with LLM(four_heads, tensor_parallel_size=2, pipeline_parallel_size=2, **options) as llm:
        pids = pids_of(llm)
        llm.llm_engine.add_request("long", PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(4):
            llm.llm_engine.step()
        os.kill(pids[victim - 1], signal.SIGKILL)
        told = rf"rank {victim} of 4 \(process {pids[victim - 1]}\) was killed by signal 9 \(SIGKILL\)"
        with pytest.raises(RankError, match=told):
            _step_for_ever(llm)
    until(lambda: gone(*pids))


@pytest.mark.slow
def test_drafts_by_lookup(checkpoint: Path, options: dict[str, Any]) -> None:
    """Drafts that the device makes are of all ranks."""
    prompts = ["the cat sat on the mat the cat sat on the", "hello hello hello hello"]
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(checkpoint, **options) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)]
    drafts: dict[str, Any] = {"num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with LLM(checkpoint, tensor_parallel_size=2, **options, **drafts) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)] == expected
        assert llm.llm_engine.core.stats().draft_tokens > 0


@pytest.mark.slow
def test_a_rank_that_stops(checkpoint: Path, options: dict[str, Any]) -> None:
    """It gives no sign of life, which is noticed within seconds; it ends though it cannot run."""
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        (pid,) = pids_of(llm)
        llm.generate(PROMPTS[0], GREEDY)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank 1 of 2 \(process \d+\) has given no sign of life for 5 seconds"):
            llm.generate(PROMPTS, GREEDY)
    until(lambda: gone(pid))


@pytest.mark.slow
def test_a_rank_that_samples_something_else(
    checkpoint: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot go unnoticed: its cache would be of another text."""
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        ranks = executor_of(llm).ranks
        send = ranks.send

        def with_other_seeds(command: Any) -> None:
            if isinstance(command, Start):
                command.arrays["seed"] = Array.of(command.arrays["seed"].numpy() + 1)
            send(command)

        monkeypatch.setattr(ranks, "send", with_other_seeds)
        with pytest.raises(RankError, match=r"rank 1 chose other tokens than rank 0 in step [1-9]"):
            llm.generate(PROMPTS, SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True))


def test_settings_that_cannot_be(checkpoint: Path, options: dict[str, Any]) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        with pytest.raises(ConfigError, match="this process has an engine of several ranks already; close it first"):
            LLM(checkpoint, tensor_parallel_size=2, **options)
        assert llm.generate(PROMPTS[0], GREEDY)[0].finished
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3: "):
        LLM(checkpoint, tensor_parallel_size=3, **options)
