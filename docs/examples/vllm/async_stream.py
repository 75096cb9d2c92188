"""Texts as they are made, of several requests at once."""

import asyncio

from graphllm import AsyncEngineArgs, AsyncLLMEngine, RequestOutputKind, SamplingParams


async def stream(engine, prompt, request_id):
    sampling = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    parts = []
    async for output in engine.generate(prompt=prompt, sampling_params=sampling, request_id=request_id):
        parts += [completion.text for completion in output.outputs]
    print(f"{request_id}: {''.join(parts)!r}")


async def stream_all(**options):
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**options))
    try:
        await asyncio.gather(*(stream(engine, prompt, f"request-{i}") for i, prompt in enumerate(["Hello", "What"])))
    finally:
        engine.shutdown()


def main(**options):
    asyncio.run(stream_all(**options))


if __name__ == "__main__":
    main()
