"""One call in the engine: its prompts run side by side, and their outputs come as one stream."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphllm.chat.call import Call
from graphllm.chat.reading import failure
from graphllm.chat.replies import ReplyReader
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RequestOutputKind
from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.requests.outputs import RequestOutput
from graphllm.engine.requests.processor import Prompt
from graphllm.engine.requests.request import Adapter, QueueFullError
from graphllm.entrypoints.async_llm import EngineUnhealthyError
from graphllm.entrypoints.engine_client import EngineClient
from graphllm.entrypoints.streaming.streams import merge
from graphllm.entrypoints.tracing import Tracing
from graphllm.server.http.errors import failure_error
from graphllm.server.http.wire import Record
from graphllm.server.service.beams import search
from graphllm.server.supervision.metrics import Metrics


class News(NamedTuple):
    """An output of the prompt of that number."""

    prompt: int
    output: RequestOutput


class Running:
    """Requests in an engine by the ids that clients gave them, which several may share."""

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {}

    @contextlib.contextmanager
    def noted(self, name: str, id: str) -> Iterator[None]:
        """While this runs, the client's request ``name`` is the engine's request ``id``, too."""
        self._ids.setdefault(name, set()).add(id)
        try:
            yield
        finally:
            self._ids[name].discard(id)
            if not self._ids[name]:
                del self._ids[name]

    def of(self, names: Iterable[str]) -> list[str]:
        """The engine's ids of clients' requests."""
        return [id for name in names for id in self._ids.get(name, ())]


async def generate(
    engine: EngineClient,
    call: Call,
    prompts: Sequence[Prompt],
    record: Record,
    metrics: Metrics,
    running: Running,
    tracing: Tracing | None = None,
    adapter: Adapter | None = None,
) -> AsyncGenerator[News, None]:
    """Deltas of a streamed call, and of one that ends with its first tool call; else one finished output for each
    prompt. Closing it aborts what runs. adapter: answers together with the model.

    Raises what the engine refuses, EngineFailureError for a request that it could not finish.
    """
    assert engine.ready is not None
    info = engine.ready.info
    deltas = call.stream or call.reply.single
    kind = RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY
    call = call._replace(params=replace(call.params, output_kind=kind))
    # As many as one step takes, so that a body of a thousand leaves others their place in the queue.
    at_once = asyncio.Semaphore(max(1, info.max_num_seqs // call.params.n))
    turns = _Turns(asyncio.Lock(), at_once, len(prompts), len(prompts), running, adapter)
    runs = [_run(engine, call, prompt, i, metrics, record, turns) for i, prompt in enumerate(prompts)]
    found = runs[0] if len(runs) == 1 else _merged(runs)
    tokens = cached = prompt_tokens = 0
    reasons, counts = [], [0] * len(prompts)
    async with contextlib.aclosing(found) as news:
        async for one in news:
            output = one.output
            new = sum(len(c.token_ids) for c in output.outputs)
            tokens, counts[one.prompt] = tokens + new, counts[one.prompt] + new
            if (broken := failure([output])) is not None:
                raise failure_error(*broken)
            if (wanted := call.params.max_tokens) and wanted > (
                room := info.max_model_len - len(output.prompt_token_ids)
            ):
                record.headers["x-max-tokens-clamped"] = str(room)
            if output.finished and tracing is not None:
                tracing.request(record.id, record.traceparent, call.params, output, counts[one.prompt])
            if output.finished:
                prompt_tokens += len(output.prompt_token_ids)
                cached += output.num_cached_tokens
                times = output.metrics
                record.notes["ttft_ms"] = round(1000 * (times.first_token_time - times.arrival_time), 1)
            reasons += [str(c.finish_reason) for c in output.outputs if c.finished()]
            record.notes |= {"prompt": prompt_tokens, "cached": cached, "tokens": tokens, "end": ",".join(reasons[:8])}
            yield one


@dataclass
class _Turns:
    """The state that the prompts of one call share.

    tokenizing: one prompt holds it, so that prompts of other calls come in between.
    running: number of prompts that may be in the engine.
    untokenized: number of prompts that are still text.
    count: of the prompts.
    requests: of all calls.
    adapter: of all prompts.
    begun: one prompt has an output.
    """

    tokenizing: asyncio.Lock
    running: asyncio.Semaphore
    untokenized: int
    count: int
    requests: Running
    adapter: Adapter | None
    begun: bool = False


async def _run(
    engine: EngineClient, call: Call, prompt: Prompt, number: int, metrics: Metrics, record: Record, turns: _Turns
) -> AsyncGenerator[News, None]:
    tracker = metrics.track(call.params)
    readers = [ReplyReader(call.reply) for _ in range(call.params.n)] if call.reply.single else []
    try:
        async with turns.running:
            async with turns.tokenizing:
                prompt = await engine.tokenized(prompt)
            turns.untokenized -= 1
            if not turns.untokenized:
                record.held.close()
            while not tracker.over:
                id = secrets.token_hex(8)  # not that of the record: a client may send it twice
                if call.beams is not None:
                    outputs = search(engine, call, prompt, turns.adapter)
                else:
                    outputs = engine.generate(
                        prompt,
                        call.params,
                        id,
                        priority=call.priority,
                        cache_salt=call.cache_salt,
                        adapter=turns.adapter,
                    )
                try:
                    with turns.requests.noted(record.id, id):
                        async with contextlib.aclosing(outputs) as stream:
                            async for output in stream:
                                turns.begun = True
                                tracker.output(output)
                                for completion in output.outputs if readers else ():
                                    readers[completion.index].feed(completion.text)
                                    if readers[completion.index].done and not completion.finished():
                                        engine.finish(id, completion.index)
                                yield News(number, output)
                except QueueFullError:
                    if not turns.begun:
                        raise
                    await asyncio.sleep(1)  # what the others of this call have done is not thrown away
    except QueueFullError as full:
        tracker.reject("max_num_queued_reqs")
        full.retry_after = metrics.seconds_for(engine.unfinished)
        raise
    except ConfigError as mistake:
        tracker.drop()
        raise call.prompt_error(mistake, number, turns.count) from None
    except (EngineDeadError, EngineUnhealthyError):
        tracker.end("error")
        raise
    finally:
        tracker.end()


async def paced(news: AsyncGenerator[News, None], interval: int) -> AsyncGenerator[News, None]:
    """Outputs of a stream with ``interval`` new tokens each, but for the first and the last of each prompt."""
    waiting: dict[int, RequestOutput] = {}
    begun: set[int] = set()
    async with contextlib.aclosing(news) as stream:
        async for one in stream:
            output = merge(waiting.pop(one.prompt, None), one.output)
            ready = output.finished or any(c.finished() for c in output.outputs) or one.prompt not in begun
            if ready or sum(len(c.token_ids) for c in output.outputs) >= interval:
                begun.add(one.prompt)
                yield News(one.prompt, output)
            else:
                waiting[one.prompt] = output


async def _merged(runs: Sequence[AsyncGenerator[News, None]]) -> AsyncGenerator[News, None]:
    """What several give, in the order in which it comes; the first exception ends all."""
    queue: asyncio.Queue[News | BaseException | None] = asyncio.Queue(maxsize=1)

    async def feed(run: AsyncIterator[News]) -> None:
        try:
            async for news in run:
                await queue.put(news)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(feed(run)) for run in runs]
    try:
        left = len(runs)
        while left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in runs:
            await run.aclose()
