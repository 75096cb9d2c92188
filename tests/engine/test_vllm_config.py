"""`create_engine_config`: what vLLM's users read of it, against transformers; and engines made of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from graphllm import AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from graphllm.config import ConfigError
from graphllm.engine.requests.request import CoreStats

GREEDY = SamplingParams(temperature=0, max_tokens=4)


class Told:
    """A logger of vLLM's shape."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.about = (vllm_config.cache_config.block_size, engine_index)
        self.seen: list[tuple[int, float]] = []
        made.append(self)

    def record(self, scheduler_stats: CoreStats, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0):  # type: ignore[no-untyped-def]
        self.seen.append((scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage))

    def log(self) -> None: ...


made: list[Told] = []


def _args(checkpoint: Path, artifact: Path, **more: Any) -> EngineArgs:
    return EngineArgs(str(checkpoint), artifact=str(artifact), **more)


def test_what_it_says(checkpoint: Path) -> None:
    config = EngineArgs(str(checkpoint), max_num_seqs=8, enforce_eager=True, dtype="half").create_engine_config()
    theirs = AutoConfig.from_pretrained(checkpoint)
    model = config.model_config
    assert (model.model, model.dtype, model.max_model_len) == (str(checkpoint), torch.float16, 128)
    assert (model.get_vocab_size(), model.enforce_eager, model.seed) == (theirs.vocab_size, True, 0)
    for name in ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "rope_parameters"):
        assert getattr(model.hf_config, name) == getattr(theirs, name)
    scheduler, parallel = config.scheduler_config, config.parallel_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.policy) == (8, 2048, "fcfs")
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size) == (1, 1, 1)
    cache = config.cache_config
    assert (cache.block_size, cache.gpu_memory_utilization, cache.enable_prefix_caching) == (16, 0.9, True)
    assert (config.load_config.load_format, config.device_config.device) == ("auto", "cpu")
    assert (config.lora_config, config.speculative_config) == (None, None)


def test_it_is_for_reading(checkpoint: Path) -> None:
    model = EngineArgs(checkpoint).create_engine_config().model_config
    with pytest.raises(ConfigError, match=r"model_config.max_model_len is 9: a config can only be read; give EngineA"):
        model.max_model_len = 9
    with pytest.raises(AttributeError, match=r"model_config.max_len: not here; there are .*max_model_len"):
        model.max_len  # noqa: B018
    with pytest.raises(ConfigError, match="model: "):
        EngineArgs("/no/model").create_engine_config()


@pytest.mark.thorough
def test_an_engine_of_it(checkpoint: Path, eager_artifact: Path) -> None:
    config = _args(checkpoint, eager_artifact).create_engine_config()
    engine = LLMEngine.from_vllm_config(config, stat_loggers=[Told])
    engine.add_request("a", "hello world", GREEDY)
    outputs = [output for _ in range(9) for output in engine.step()]
    engine.do_log_stats()
    engine.close()
    assert made[-1].about == (8, 0)
    assert made[-1].seen == [(0, 0.0)]

    async def answer() -> list[int]:
        llm = AsyncLLMEngine.from_vllm_config(config, disable_log_stats=True)
        try:
            return [o async for o in llm.generate("hello world", GREEDY, "a")][-1].outputs[0].token_ids
        finally:
            await llm.close()

    assert asyncio.run(answer()) == outputs[-1].outputs[0].token_ids
    assert outputs[-1].outputs[0].finished()
