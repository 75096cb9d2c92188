"""Two engine cores, each on a GPU of its own: text as of one, and the death of one. One command runs them:

python -m pytest -m gpu tests/gpu/test_data_parallel_cuda.py
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm import LLM, AsyncLLM, SamplingParams
from graphllm.config import EngineArgs
from graphllm.engine.process.messages import EngineDeadError
from tests.core_processes import core_pids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [n + 1, 2 * n + 3, 7, 11, n + 20]} for n in range(8)]


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {
        "target": "cuda", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "block_size": 16, "tune": False, "kv_cache_memory_bytes": 1 << 28, "skip_tokenizer_init": True,
    }  # fmt: skip


def visible(pid: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)["CUDA_VISIBLE_DEVICES"]


def test_text_of_several_gpus(checkpoint: Path, options: dict[str, Any]) -> None:
    with LLM(checkpoint, **options) as alone:
        expected = [o.outputs[0].token_ids for o in alone.generate(PROMPTS, GREEDY)]
    with LLM(checkpoint, data_parallel_size=2, **options) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected
        core: Any = llm.llm_engine.core
        assert [stats.generated_tokens for stats in core.engine_stats()] == [160, 160]
        assert len({visible(pid) for pid in core_pids()}) == len(core_pids()) == 2


def test_a_core_that_is_killed_comes_back_on_its_gpu(checkpoint: Path, options: dict[str, Any]) -> None:
    async def main() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(checkpoint, data_parallel_size=2, **options))
        await engine.start()

        async def one(number: int) -> list[int]:
            tokens: list[int] = []
            async for output in engine.generate(PROMPTS[number], GREEDY, f"{number}"):
                tokens = list(output.outputs[0].token_ids)
            return tokens

        try:
            expected = await asyncio.gather(*map(one, range(8)))
            second = core_pids()[1]
            device = visible(second)
            os.kill(second, signal.SIGKILL)
            while engine.cores.healths()[1].state != "dead":
                await asyncio.sleep(0.05)
            assert await asyncio.gather(*map(one, range(8))) == expected  # on the other one
            await engine.cores.restart(1)
            assert visible(core_pids()[1]) == device
            assert await asyncio.gather(*map(one, range(8))) == expected
            for pid in core_pids():
                os.kill(pid, signal.SIGKILL)
            while not engine.errored:
                await asyncio.sleep(0.05)
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                await one(0)
        finally:
            await engine.close()

    asyncio.run(main())
