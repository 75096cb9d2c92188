"""Engine cores that have the experts of a layer together: each with its own requests, the text, log-probabilities and
router choices of transformers; one without requests keeps step, and none runs where all have none."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.messages import EngineDeadError
from tests.core_processes import core_pids
from tests.engine.experts.test_moving_experts import (  # noqa: F401
    GREEDY,
    OPTIONS,
    PROMPTS,
    check,
    check_output,
    checkpoint,
    model,
)
from tests.models.test_parity import ARCHS, V, saved_oracle
from tests.waiting import gone, until

SHARING = {**OPTIONS, "enable_eplb": False, "count_expert_tokens": True}


def seconds_of(pid: int) -> float:
    """That a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cores", "backend"),
    [
        (2, "eager"),
        pytest.param(4, "eager", marks=pytest.mark.slow),
        pytest.param(2, "inductor", marks=pytest.mark.slow),
    ],
)
def test_text_and_counts(checkpoint: Path, model: Any, cores: int, backend: str) -> None:  # noqa: F811
    with LLM(checkpoint, **SHARING | {"data_parallel_size": cores, "backend": backend}) as llm:
        core: Any = llm.llm_engine.core
        counted = check(model, llm, PROMPTS[:1])
        steps = [stats.steps for stats in core.engine_stats()]
        assert sorted(steps)[:-1] == [0] * (cores - 1)  # the others ran steps of padding alone
        for prompts in (PROMPTS, PROMPTS[2:3], PROMPTS * 3):
            counted += check(model, llm, prompts)
        assert all(stats.steps for stats in core.engine_stats())
        assert np.array_equal(core.stats().expert_tokens, counted)
        pids = core_pids()
        assert len(pids) == cores
        begun, before = time.monotonic(), [seconds_of(pid) for pid in pids]
        time.sleep(1)
        computed = [seconds_of(pid) - seconds for pid, seconds in zip(pids, before, strict=True)]
        assert max(computed) < (time.monotonic() - begun) / 5  # all sleep
        check(model, llm, PROMPTS[:1])
    until(lambda: gone(*pids))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2_lite"])
def test_attention_over_latents_by_data(name: str, tmp_path: Path) -> None:
    """Each core has a cache of latents and the heads of its own requests; the routed experts are divided."""
    arch = next(a for a in ARCHS if a.name == name)
    oracle, given = saved_oracle(arch, tmp_path), [[token % V for token in ids] for ids in PROMPTS]
    with LLM(tmp_path, **SHARING | {"data_parallel_size": 2, "count_expert_tokens": False}) as llm:
        for prompts in (given, given * 3):
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            for ids, output in zip(prompts, llm.generate(asked, GREEDY, use_tqdm=False), strict=True):
                found = output.outputs[0]
                with torch.inference_mode():
                    logits = oracle(torch.tensor([[*ids, *found.token_ids[:-1]]])).logits[0, len(ids) - 1 :]
                check_output(found, logits)
        core: Any = llm.llm_engine.core
        assert all(stats.steps for stats in core.engine_stats())


@pytest.mark.thorough
def test_cores_sleep_and_wake_up_together(checkpoint: Path) -> None:  # noqa: F811
    """Requests that wait in a core that sleeps begin no step of the others; all that was asked for is answered."""
    with LLM(checkpoint, **SHARING | {"data_parallel_size": 2, "enable_sleep_mode": True}) as llm:
        core: Any = llm.llm_engine.core
        given = [{"prompt_token_ids": ids} for ids in PROMPTS]
        expected = [output.outputs[0].token_ids for output in llm.generate(given, GREEDY, use_tqdm=False)]
        for level, mode in ((1, "keep"), (2, "wait"), (2, "keep")):
            done: dict[str, Any] = {}
            for number, prompt in enumerate(given):
                llm.llm_engine.add_request(f"{number}", prompt, GREEDY)
            for _ in range(3):
                done |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
            llm.sleep(level, mode)
            steps = [stats.steps for stats in core.engine_stats()]
            for number, prompt in enumerate(given):
                llm.llm_engine.add_request(f"later {number}", prompt, GREEDY)
            until(lambda: core.stats().waiting >= len(given))
            llm.wake_up(["weights"])
            assert [stats.steps for stats in core.engine_stats()] == steps
            assert core.stats().paused
            llm.wake_up(["kv_cache"])
            while llm.llm_engine.has_unfinished_requests():
                done |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
            for number, tokens in enumerate(expected):
                assert done[f"{number}"].outputs[0].token_ids == tokens
                assert done[f"later {number}"].outputs[0].token_ids == tokens


@pytest.mark.thorough
@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_core_that_dies(checkpoint: Path, model: Any, busy: bool) -> None:  # noqa: F811
    """The others say which one, at once, and end: they miss its experts. Also where nobody has work."""
    with LLM(checkpoint, **SHARING | {"data_parallel_size": 2}) as llm:
        core: Any = llm.llm_engine.core
        pids = core_pids()
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=2), use_tqdm=False)
        if busy:
            for i in range(8):
                params = SamplingParams(max_tokens=80, ignore_eos=True)
                llm.llm_engine.add_request(f"{i}", {"prompt_token_ids": PROMPTS[0]}, params)
            llm.llm_engine.step()
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: gone(pids[0]))
        told = rf"engine core 1 of 2 \(process {pids[1]}\) is gone, and with it the experts"
        with pytest.raises(EngineDeadError, match=told):  # the cause of the first core's end
            until(core.check_health)
        if not busy:  # all are brought back, as --restart-engine does
            core._wait(_restarted(core._client))
            check(model, llm)
            pids += core_pids()
    until(lambda: gone(*pids))


async def _restarted(group: CoreGroup) -> None:
    await asyncio.gather(group.restart(0), group.restart(1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_size": 3}, "data_parallel_size is 3: the 8 experts of a layer are no multiple of it"),
        ({"data_parallel_size": 2, "enable_eplb": True}, "enable_eplb is True: that is not there for 2 engine cores"),
        (
            {"data_parallel_size": 2, "pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2: engine cores that share experts have one stage; use 1",
        ),
        ({}, "enable_expert_parallel: one rank has all experts; set tensor_parallel_size or data_parallel_size"),
    ],
)
def test_settings_that_cannot_be(checkpoint: Path, given: dict[str, Any], message: str) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM(checkpoint, **SHARING | given)
