"""Beam search for a request: each step is one request of one token for each live beam
(`graphllm.engine.requests.beam`)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator

from graphllm.chat.call import Call
from graphllm.chat.reading import failure
from graphllm.engine.requests.beam import BeamSearch, BeamSearchSequence, step_params
from graphllm.engine.requests.outputs import CompletionOutput, Position, RequestOutput
from graphllm.engine.requests.processor import Prompt
from graphllm.engine.requests.request import Adapter
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.engine_client import EngineClient
from graphllm.server.http.errors import EngineFailureError, failure_error
from graphllm.server.http.wire import cancelled


async def search(
    engine: EngineClient, call: Call, prompt: Prompt, adapter: Adapter | None = None
) -> AsyncGenerator[RequestOutput, None]:
    """One output, with the best sequences as its completions. Raises what the engine refuses, EngineFailureError for a
    step that it could not finish."""
    assert engine.ready is not None
    assert call.beams is not None
    info, tokenizer = engine.ready.info, await engine.get_tokenizer()
    params = step_params(call.beams, info.max_logprobs)
    stops = tokenizer.stop_ids if tokenizer else frozenset[int]()

    async def step(prompt: Prompt) -> RequestOutput:
        found: list[RequestOutput] = []
        outputs = engine.generate(
            prompt,
            params,
            secrets.token_hex(8),
            priority=call.priority,
            cache_salt=call.cache_salt,
            adapter=adapter,
        )
        async with contextlib.aclosing(outputs) as stream:
            found += [output async for output in stream]
        if (broken := failure(found)) is not None:
            raise failure_error(*broken)
        return found[-1]

    first = await step(prompt)
    beams = BeamSearch(first.prompt_token_ids, call.beams, stops, info.max_model_len)
    steps = [first]
    while beams.prompts():
        beams.advance([_position(output) for output in steps])
        tasks = [asyncio.ensure_future(step(ids)) for ids in beams.prompts()]
        try:
            steps = await asyncio.gather(*tasks)
        finally:
            await cancelled(*tasks)
    best = [_completion(i, sequence, call, tokenizer) for i, sequence in enumerate(beams.best())]
    last = steps[-1] if steps else first
    first.metrics.last_token_time, first.metrics.finished_time = (
        last.metrics.last_token_time,
        last.metrics.finished_time,
    )
    yield RequestOutput(
        first.request_id, first.prompt, first.prompt_token_ids, None, best, True, first.metrics, first.num_cached_tokens
    )


def _position(output: RequestOutput) -> Position:
    (completion,) = output.outputs
    if not completion.logprobs:
        raise EngineFailureError("a step of the beam search has given no token; send the request again")
    return completion.logprobs[0]


def _completion(index: int, sequence: BeamSearchSequence, call: Call, tokenizer: Tokenizer | None) -> CompletionOutput:
    tokens, prompt = sequence.tokens[sequence.prompt_tokens :], sequence.tokens[: sequence.prompt_tokens]
    ended = sequence.finish_reason == "stop"
    shown = tokens[:-1] if ended and not call.params.include_stop_str_in_output else tokens
    text = "" if tokenizer is None else tokenizer.output_text(prompt, shown, call.params.skip_special_tokens)
    wanted = call.params.logprobs
    listed = None
    if wanted is not None:
        offsets = [None] * len(tokens) if tokenizer is None else tokenizer.text_offsets(tokens)
        taken = zip(sequence.logprobs, tokens, offsets, strict=True)
        listed = [_listed(position, token, wanted, at) for position, token, at in taken]
    return CompletionOutput(index, text, tokens, sequence.cum_logprob, listed, sequence.finish_reason)


def _listed(position: Position, token: int, wanted: int, offset: int | None) -> Position:
    """As other completions have it: the token that was taken, then the likeliest."""
    likeliest = {i: entry for i, entry in position.items() if i != token and (entry.rank or 0) <= wanted}
    own = position[token]._replace(offset=offset)
    return {token: own, **likeliest}
