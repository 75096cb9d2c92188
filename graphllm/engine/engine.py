"""Engine: the step loop. Requests go in as token ids, text comes out token by token.

admit -> scheduler.next -> stage -> executor.run -> commit; a step's arrays are made here from the scheduler's plan.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.params import SamplingParams
from graphllm.engine.scheduler import Scheduled, Scheduler, Sequence
from graphllm.engine.text import Detokenizer, Tokenizer
from graphllm.runtime.executor import Executor, StepInput, stack_tables


class Output(NamedTuple):
    """News of one request: the text its newest token completed; finish_reason once it is done ("stop" or "length").

    text and token_ids are everything so far.
    """

    id: str
    delta: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str | None


@dataclass
class _Stream:
    """The text side of a request. A stop string may span tokens, so the end of the text is searched with each one."""

    detokenizer: Detokenizer
    text: str = ""
    sent: int = 0


class Engine:
    """Feeds one executor. max_len: tokens a sequence may have, prompt and output together."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer, max_len: int) -> None:
        self._executor, self.tokenizer, self._max_len = executor, tokenizer, max_len
        self._scheduler = Scheduler(
            executor.max_num_seqs, executor.max_num_tokens, executor.kv_pages, executor.page_size
        )
        self._streams: dict[str, _Stream] = {}
        self._ids = itertools.count()

    @property
    def unfinished(self) -> int:
        """Requests that are not done."""
        return self._scheduler.unfinished

    def add(self, prompt: list[int], params: SamplingParams, id: str | None = None) -> str:
        """Queue a request; returns its id. Raises ConfigError, naming the field, for one that cannot run."""
        name = id if id is not None else str(next(self._ids))
        if name in self._streams:
            raise ConfigError(f"id: {name!r} is already running; ids must be unique")
        if not prompt:
            raise ConfigError(f"request {name}: prompt is empty; give at least one token")
        if len(prompt) >= self._max_len:
            raise ConfigError(
                f"request {name}: prompt has {len(prompt)} tokens, the context holds {self._max_len} with at least "
                "one of output; shorten it or compile with a larger --max-model-len"
            )
        outside = [t for t in prompt if not 0 <= t < self._executor.vocab]
        if outside:
            raise ConfigError(
                f"request {name}: token id {outside[0]} is not in the vocabulary of {self._executor.vocab}"
            )
        room = self._max_len - len(prompt)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.stop_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._scheduler.add(Sequence(name, prompt, params, seed, stops, limit))
        self._streams[name] = _Stream(self.tokenizer.detokenizer(prompt, params.skip_special_tokens))
        return name

    def step(self) -> list[Output]:
        """Run one step; the news of every request that got a token."""
        plan = self._scheduler.next()
        if not plan:
            return []
        result = self._executor.run(stage(plan))
        tokens = self._executor.tokens(result, len(plan)).tolist()
        return [self._output(sequence) for sequence in self._scheduler.commit(plan, tokens)]

    def run(self) -> Iterator[Output]:
        """Step until every request is done."""
        while self.unfinished:
            yield from self.step()

    def _output(self, sequence: Sequence) -> Output:
        stream = self._streams[sequence.id]
        ended_by_token = sequence.finish_reason == "stop"
        if not (ended_by_token and sequence.params.skip_special_tokens):
            stream.text += stream.detokenizer.step(sequence.output[-1:])
        stop_at = _find_stop(stream.text, stream.sent, sequence.params.stop)
        if stop_at is not None:
            stream.text = stream.text[:stop_at]
            if sequence.finish_reason is None:
                self._scheduler.release(sequence)
            sequence.finish_reason = "stop"
        # Text that may be the beginning of a stop string is held back until it is known not to be.
        held = 0 if sequence.finish_reason else _possible_stop(stream.text, sequence.params.stop)
        delta = stream.text[stream.sent : len(stream.text) - held]
        stream.sent += len(delta)
        if sequence.finish_reason:
            del self._streams[sequence.id]
        return Output(
            sequence.id, delta, stream.text, list(sequence.output), len(sequence.prompt), sequence.finish_reason
        )


def _find_stop(text: str, start: int, stops: tuple[str, ...]) -> int | None:
    found = [at for s in stops if (at := text.find(s, start)) >= 0]
    return min(found, default=None)


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that begins a stop string."""
    longest = max((len(s) for s in stops), default=0) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


def stage(plan: list[Scheduled]) -> StepInput:
    """The step's arrays for a plan."""
    counts = np.array([p.tokens for p in plan], dtype=np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    ids = [_tokens(p) for p in plan]
    params = [p.sequence.params for p in plan]
    return StepInput(
        token_ids=np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(ends[-1])),
        positions=np.concatenate([np.arange(p.start, p.start + p.tokens, dtype=np.int32) for p in plan]),
        context_len=np.repeat(np.array([p.sequence.known for p in plan], dtype=np.int32), counts),
        logit_rows=ends - 1,
        query_start=np.concatenate([np.zeros(1, dtype=np.int32), ends]),
        seq_len=np.array([p.start + p.tokens for p in plan], dtype=np.int32),
        block_table=stack_tables([p.sequence.pages for p in plan]),
        temperature=np.array([q.temperature for q in params], dtype=np.float32),
        top_k=np.array([q.top_k for q in params], dtype=np.int32),
        top_p=np.array([q.top_p for q in params], dtype=np.float32),
        min_p=np.array([q.min_p for q in params], dtype=np.float32),
        seed=np.array([p.sequence.seed for p in plan], dtype=np.int64),
        draw=np.array([len(p.sequence.output) for p in plan], dtype=np.int32),
    )


def _tokens(entry: Scheduled) -> list[int]:
    prompt, output = entry.sequence.prompt, entry.sequence.output
    end = entry.start + entry.tokens
    if entry.start >= len(prompt):
        return output[entry.start - len(prompt) : end - len(prompt)]
    return prompt[entry.start : end] + output[: max(0, end - len(prompt))]
