"""`AsyncLLM.encode` against `LLM.encode` and transformers: many at once, refusals, and one that is aborted."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
import torch
import transformers

from graphllm import AsyncLLM, EngineArgs, PoolingParams
from graphllm.config import ConfigError
from tests.engine.vectors.test_pooling import PROMPTS, SIZES


def test_encode(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path / "m")
    with torch.no_grad():
        expected = [model(torch.tensor([p])).last_hidden_state[0, -1] for p in PROMPTS]
    args = EngineArgs(
        tmp_path / "m", skip_tokenizer_init=True, backend="eager", target="cpu", dtype="float32", max_num_seqs=4,
        max_model_len=128, max_num_batched_tokens=16,
    )  # fmt: skip

    async def one(engine: AsyncLLM, number: int) -> torch.Tensor:
        async for output in engine.encode(PROMPTS[number], PoolingParams(), f"r{number}"):
            assert (output.request_id, output.prompt_token_ids, output.finished) == (
                f"r{number}",
                PROMPTS[number],
                True,
            )
            return output.outputs.data
        raise AssertionError

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(args)
        try:
            found = await asyncio.gather(*(one(engine, i) for i in range(len(PROMPTS))))
            for vector, state in zip(found, expected, strict=True):
                assert torch.cosine_similarity(vector, state, dim=0) > 1 - 1e-5
            with pytest.raises(ConfigError, match="dimensions is 33: the model gives 32"):
                await anext(engine.encode([1], PoolingParams(dimensions=33), "x"))
            tasks = [asyncio.create_task(one(engine, len(PROMPTS) - 1))]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            assert engine.unfinished == 0
            torch.testing.assert_close(await one(engine, 0), found[0], rtol=1e-4, atol=1e-5)
        finally:
            await engine.close()

    asyncio.run(run())
