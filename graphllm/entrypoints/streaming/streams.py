"""The open streams of an engine that serves one event loop: a reader's part of a request, and all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RequestOutputKind
from graphllm.engine.process.core_client import CoreClient
from graphllm.engine.process.core_group import CoreGroup, Lost
from graphllm.engine.process.messages import CoreLoad, DeathCause, EngineDeadError, Rejected, Updates
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.requests.outputs import CompletionOutput, OutputProcessor, Processed, RequestOutput
from graphllm.engine.requests.processor import ParsedRequest
from graphllm.engine.requests.request import EngineCoreOutput, EngineRequest, QueueFullError

_SLICE = 128  # updates detokenized before the event loop gets a turn
# UNREAD: tokens and log-probabilities, some 200 bytes each, that may wait for all readers together. Above it, streams
# without a reader for _UNREAD_SECONDS end; the stream with the most goes first.
UNREAD, _UNREAD_SECONDS = 1 << 18, 5.0


class SlowReaderError(RuntimeError):
    """Nobody took a stream's outputs, and there is no room for more."""


class RequestNames:
    """The core's names of running requests, by the user's ids. The core may not hear of a request's end in time, so an
    id that is used again gets another name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._names)

    def new(self, request_id: str) -> str:
        """A name that was not used before."""
        return f"{request_id}-{next(self._numbers)}"

    @contextlib.contextmanager
    def running(self, request_id: str) -> Iterator[str]:
        """The name of a request while it runs. Raises ConfigError when one with this id is running."""
        if request_id in self._names:
            raise ConfigError(f"request_id: {request_id!r} is already running; ids must be unique")
        self._names[request_id] = name = self.new(request_id)
        try:
            yield name
        finally:
            del self._names[request_id]

    def of(self, request_id: str) -> str | None:
        """The name of a running request."""
        return self._names.get(request_id)


class PooledRequests:
    """Requests for vectors that run, by the core's names of them."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[EngineCoreOutput]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    async def run(self, client: CoreClient | RemoteCore | CoreGroup, request: EngineRequest) -> EngineCoreOutput:
        """The last output of a request. Raises what it fails with; one that nobody waits for any more is aborted."""
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        try:
            client.add([request])
            return await future
        except asyncio.CancelledError:
            client.abort([request.id])
            raise
        finally:
            del self._waiting[request.id]

    def take(self, updates: Iterable[EngineCoreOutput]) -> None:
        """Hand out those that end a request."""
        for update in updates if self._waiting else ():
            future = self._waiting.get(update.id)
            if future is not None and update.finish_reason is not None and not future.done():
                future.set_result(update)

    def fail(self, error: Exception, names: Sequence[str] | None = None) -> int:
        """End these, None for all, with an error; how many."""
        found = [self._waiting.get(name) for name in (list(self._waiting) if names is None else names)]
        waiting = [future for future in found if future is not None and not future.done()]
        for future in waiting:
            future.set_exception(error)
        return len(waiting)


class RequestStreams:
    """The streams of one engine's requests, by the core's names, and what the core's messages mean for them.

    outputs: makes outputs of the core's updates. pooled: the requests for vectors. abort: tells the core to end
    requests. most_unread: tokens and log-probabilities that may wait for their readers.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        pooled: PooledRequests,
        abort: Callable[[Sequence[str]], None],
        most_unread: int,
    ) -> None:
        self._outputs, self._pooled, self._abort = outputs, pooled, abort
        self._most_unread = most_unread
        self._streams: dict[str, Stream] = {}

    @contextlib.contextmanager
    def opened(self, name: str, parsed: ParsedRequest) -> Iterator[Stream]:
        """A stream for a request; leaving it early aborts the request."""
        stream = self._streams[name] = Stream(parsed)
        try:
            yield stream
        finally:
            self._streams.pop(name).drop()
            self._abort(self._outputs.abort([name]))

    def abort(self, names: Iterable[str]) -> None:
        """Have the core end these; their streams end with finish_reason "abort"."""
        found = list(names)
        streams = [self._streams[name] for name in found if name in self._streams]
        pooled = [name for name in found if name in self._pooled]
        self._abort([r.id for stream in streams for r in stream.parsed.requests] + pooled)

    def finish(self, name: str, index: int) -> None:
        """End one completion as a stop string does."""
        self._give_out(self._outputs.finish(name, index))

    def fail(self, error: Exception, ids: Sequence[str] | None = None) -> int:
        """End streams with an error; how many. ids: the core's of their requests; None for all of them."""
        streams = list(self._streams.values())
        if ids is not None:
            some = set(ids)
            streams = [stream for stream in streams if stream.parsed.requests[0].id in some]
        for stream in streams:
            stream.fail(error)
        return len(streams) + self._pooled.fail(error, ids)

    async def take(self, news: Updates | Rejected | Lost | CoreLoad) -> None:
        """Do what a message of the core asks for."""
        match news:
            case Updates(updates):
                for start in range(0, len(updates), _SLICE):
                    part = updates[start : start + _SLICE]
                    self._pooled.take(part)
                    self._give_out(self._outputs.process(part))
                    await asyncio.sleep(0)
            case Rejected():
                self._reject(news)
            case Lost(ids, cause):
                self.fail(EngineDeadError(cause), ids)
            case CoreLoad():  # for the process that spreads requests over cores
                pass

    def _give_out(self, processed: Processed) -> None:
        for output in processed.outputs:
            self._streams[output.request_id].put(output)
        self._abort(processed.aborts)
        self._bound_unread()

    def _bound_unread(self) -> None:
        unread = sum(stream.unread for stream in self._streams.values())
        if unread <= self._most_unread:
            return
        before = time.monotonic() - _UNREAD_SECONDS
        slow = {name: stream for name, stream in self._streams.items() if stream.unread and stream.since < before}
        for name in sorted(slow, key=lambda name: slow[name].unread, reverse=True):
            unread -= slow[name].unread
            slow[name].drop(SlowReaderError("stream: too much of it waits to be read; read it as it comes"))
            self._abort(self._outputs.abort([name]))
            if unread <= self._most_unread:
                break

    def _reject(self, news: Rejected) -> None:
        error: Exception
        match news.kind:
            case "queue_full":
                error = QueueFullError(news.message)
            case "invalid":
                error = ConfigError(news.message)
            case "closing":
                error = EngineDeadError(DeathCause(kind="closed", message=news.message))
        for stream in self._streams.values():
            if stream.parsed.requests[0].id == news.ids[0]:
                stream.fail(error)
        self._pooled.fail(error, news.ids)


class Stream:
    """The part of a request that its reader has not taken yet: one output at most, then an error.

    parsed: the request. unread: tokens and log-probabilities of a stream of deltas. since: when the oldest came.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self.parsed = parsed
        self.unread, self.since = 0, 0.0
        self._pending: RequestOutput | None = None
        self._dropped = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._dropped:
            return
        delta = self.parsed.params.output_kind is RequestOutputKind.DELTA
        if delta:
            if not self.unread:
                self.since = time.monotonic()
            entries = 1 + max(self.parsed.params.logprobs or 0, 0)
            self.unread += entries * sum(len(completion.token_ids) for completion in output.outputs)
        self._pending = merge(self._pending, output) if delta else output
        self._news.set()

    def drop(self, error: Exception | None = None) -> None:
        """Forget what was not taken, and take no more."""
        self._pending, self.unread, self._dropped = None, 0, True
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Raise this, or what was said first, once everything was taken; an output that finished the request counts."""
        self._error = self._error or error
        self._news.set()

    async def get(self) -> RequestOutput:
        await self._news.wait()
        if self._pending is not None:
            output, self._pending, self.unread = self._pending, None, 0
            if self._error is None:
                self._news.clear()
            return output
        assert self._error is not None
        raise self._error


def merge(older: RequestOutput | None, newer: RequestOutput) -> RequestOutput:
    """Two outputs of kind DELTA as one."""
    if older is None:
        return newer
    found = {completion.index: completion for completion in older.outputs}
    for completion in newer.outputs:
        before = found.get(completion.index)
        found[completion.index] = completion if before is None else _joined(before, completion)
    newer.outputs = [found[index] for index in sorted(found)]
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs
    return newer


def _joined(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    """``older``, extended by ``newer``."""
    older.text += newer.text
    older.token_ids += newer.token_ids
    if older.logprobs is not None and newer.logprobs is not None:
        older.logprobs += newer.logprobs
    older.cumulative_logprob = newer.cumulative_logprob
    older.finish_reason, older.stop_reason = newer.finish_reason, newer.stop_reason
    older.error, older.mistake = newer.error, newer.mistake
    return older
