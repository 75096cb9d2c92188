"""EngineCore: the step loop. Requests of token ids go in, new tokens come out, the host one step behind the device.

A step is planned and started before the tokens of the one before it are known; they reach it on the device. Where a
request's choice of tokens depends on them (a grammar, bad words), the step stops at its logits until the host has seen
them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from graphllm.config import Bucket, ConfigError, SchedulerConfig, SpeculationConfig
from graphllm.config.compilation import ranked_logprobs
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.token_tree import DynamicTree, TokenTree, of_parents
from graphllm.engine.cache.item_cache import check_items
from graphllm.engine.drafts.proposers import find_proposer
from graphllm.engine.experts.expert_balancer import ExpertBalancer
from graphllm.engine.requests.options import LogitsProcessor, Row, rowwise
from graphllm.engine.requests.request import (
    Adapter,
    BucketStats,
    CacheEntry,
    CoreInfo,
    CoreStats,
    EngineCoreOutput,
    EngineRequest,
    PositionLogprobs,
)
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import SchedulerLimits, SchedulerOutput
from graphllm.engine.step.adapter_memory import AdapterMemory
from graphllm.engine.step.batch import Batch, SamplingTable, history
from graphllm.engine.step.constraints import ConstraintError, Constraints
from graphllm.engine.step.device_states import adapter_tables, after_step, before_step, export_prefix, import_prefix
from graphllm.engine.step.providers import find_providers, provide
from graphllm.engine.step.step_executor import Handle, StepExecutor
from graphllm.engine.vectors.pooled_vectors import PooledVectors
from graphllm.engine.vectors.vector_cache import KeptVectors
from graphllm.host.importing import imported
from graphllm.runtime.commands.calls import Call, values
from graphllm.runtime.commands.states import WriteEntry
from graphllm.runtime.memory.staging import ragged

if TYPE_CHECKING:
    import torch

    from graphllm.engine.drafts.proposers import Proposer
    from graphllm.engine.experts.lockstep import CoreWaves
    from graphllm.engine.structured.bad_words import BadWords
    from graphllm.engine.structured.compiler import Grammar
    from graphllm.engine.structured.compilers import GrammarCompilers
    from graphllm.runtime.executor import StepResult

_log = logging.getLogger(__name__)
_NO_SPECULATION = SpeculationConfig()
_USUAL, _WHOLE = SamplingParams(), SamplingParams(skip_reading_prefix_cache=True)  # of requests for vectors
_COMPILERS = 4  # grammars compiled at once; a large one takes seconds, which small ones do not wait for
_NOTHING = ragged([[0]], [0])  # a step of padding alone, that writes to what is no request's
_WAIT = 0.05  # seconds that a step with nothing but grammars to compile waits for them
_NO_TOKEN = (
    "no token can be chosen: the model's logits are NaN or everything is forbidden. Check the checkpoint, or use a "
    "dtype of more range (--dtype float32)"
)


class _InFlight(NamedTuple):
    """A step that was started at ``begun``, seconds."""

    output: SchedulerOutput
    batch: Batch
    handle: Handle
    begun: float


class EngineCore:
    """Feeds one executor.

    max_len: tokens of prompt and output together.
    grammars: compiles structured outputs; None where there is no tokenizer.
    processors: see docs/logits-processors.md.
    pipeline_depth: steps that the executor runs at once, in the stages of a pipeline.
    min_batch_per_stage: a step with fewer sequences is not split over the stages.
    balancer: says which experts move; None where they do not.
    waves: of the cores that step together with this one.
    cold: buckets whose first step is still to come; `warm_up` runs one.
    """

    def __init__(
        self,
        executor: StepExecutor,
        max_len: int,
        options: SchedulerConfig,
        grammars: GrammarCompilers | None = None,
        processors: Sequence[LogitsProcessor] = (),
        speculation: SpeculationConfig = _NO_SPECULATION,
        adapters: AdapterMemory | None = None,
        pipeline_depth: int = 1,
        min_batch_per_stage: int = 1,
        balancer: ExpertBalancer | None = None,
        waves: CoreWaves | None = None,
        cold: Iterable[Bucket] = (),
    ) -> None:
        self._executor, self.grammars, self._processors = executor, grammars, processors
        self._balancer, self._waves, self._cold = balancer, waves, list(cold)
        limits = SchedulerLimits(
            max_num_seqs=executor.max_num_seqs,
            max_num_batched_tokens=executor.max_num_batched_tokens,
            max_num_rows=executor.max_rows,
            max_len=max_len,
            block_size=executor.layout.block_size,
            max_num_queued_reqs=options.max_num_queued_reqs,
            policy=options.scheduling_policy,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            snapshot_interval=options.snapshot_interval,
            device_drafts=executor.device_drafts,
            late_drafts=speculation.draft_proposer is not None,
            verify_at_most=speculation.speculative_disable_by_batch_size,
            pipeline_depth=pipeline_depth,
            min_batch_per_stage=min_batch_per_stage,
        )
        if speculation.draft_proposer is not None and (executor.device_drafts or not executor.layout.query_lens):
            why = "drafts come from the device" if executor.device_drafts else "num_speculative_tokens is 0"
            raise ConfigError(
                f"draft_proposer is {speculation.draft_proposer!r}, but {why}: give num_speculative_tokens, and "
                "neither prompt_lookup_max nor a draft model"
            )
        self._proposer = find_proposer(speculation)
        if processors and executor.task != "generate":
            raise ConfigError("logits_processors: the model has no logits; leave them out")
        # A processor that counts its calls, or keeps a row for each request, cannot be asked for rows behind drafts.
        stateful = [p for p in processors if not rowwise(p)]
        self._verifies = not stateful
        if stateful and executor.layout.query_lens:
            _log.warning(
                "drafts are not verified: the logits processor %s does not say that it is rowwise "
                "(docs/logits-processors.md)",
                getattr(stateful[0], "__name__", type(stateful[0]).__name__),
            )
        caching = options.enable_prefix_caching and executor.shareable
        policy = Scheduler if options.scheduler_cls is None else imported("scheduler_cls", options.scheduler_cls)
        if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
            raise ConfigError(
                f"scheduler_cls is {options.scheduler_cls!r}: give a subclass of "
                "graphllm.engine.schedule.scheduler.Scheduler"
            )
        self._scheduler = policy(limits, executor.layout, caching, options.cache_secret)
        self._pool = self._scheduler.cache.pool
        self._ranked = ranked_logprobs(executor.max_logprobs)
        self._table = SamplingTable(executor.max_num_seqs, executor.vocab, self._ranked)
        self._providers = find_providers(executor.inputs.values())
        self._adapters = adapters or AdapterMemory(executor.layout.max_adapters, _no_files)
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._depth = pipeline_depth  # steps that are started before the first of them is waited for
        self._news: list[EngineCoreOutput] = []  # of requests that ended outside a step
        self._compiler = concurrent.futures.ThreadPoolExecutor(_COMPILERS, "graphllm-grammars")
        self._compiling: dict[
            str, tuple[EngineRequest, concurrent.futures.Future[tuple[Grammar | None, BadWords | None]]]
        ] = {}
        self._constraints = Constraints(self._table)
        self._device_drafts = np.zeros((0, 0), dtype=np.int32)  # of the next step, by slot
        self._device_parents = self._device_drafts  # of the trees that they are, where these grow
        self._scored: dict[str, list[PositionLogprobs]] = {}  # prompt log-probabilities so far
        self._vectors = PooledVectors(executor.vector[0] == "T")
        keeps = options.enable_prefix_caching and executor.vector[0] == "T"
        self._kept = KeptVectors(options.token_vector_memory_bytes) if keeps else None
        self._ended = time.monotonic()  # the last step
        self._expert_tokens: np.ndarray | None = None
        self._stats = CoreStats(
            started=self._ended,
            total_blocks=executor.layout.num_blocks - 1,
            buckets={b.name: BucketStats() for b in executor.buckets},
        )
        self.info = CoreInfo(
            max_model_len=max_len,
            vocab=executor.vocab,
            max_num_seqs=executor.max_num_seqs,
            max_num_batched_tokens=executor.max_num_batched_tokens,
            block_size=executor.layout.block_size,
            num_blocks=executor.layout.num_blocks,
            capacity=self._scheduler.capacity,
            max_logprobs=executor.vocab if executor.max_logprobs == -1 else executor.max_logprobs,
            max_logit_bias=executor.max_logit_bias,
            device=executor.device.type,
            task=executor.task,
            vector_size=executor.vector[1],
            vectors="token" if executor.vector[0] == "T" else "sequence",
            adapted=list(executor.adapted),
            max_lora_rank=executor.max_lora_rank,
        )

    @property
    def kernels_done(self) -> int:
        """How many kernels have run, as far as the host can tell; any thread may ask."""
        return self._executor.kernels_done

    @property
    def unfinished(self) -> int:
        """Requests that are not done, and news not yet fetched."""
        waiting = self._waves is not None and self._waves.running
        return self._scheduler.unfinished + len(self._compiling) + len(self._news) + bool(self._in_flight) + waiting

    @property
    def bell(self) -> int | None:
        """A file descriptor that can be read when other cores want this one to step."""
        return None if self._waves is None else self._waves.bell

    def hear_bell(self) -> None:
        """Join the others, if they step."""
        if self._waves is not None:
            self._waves.hear()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ConfigError, QueueFullError when the queue is."""
        self._add(request)
        if self._waves is not None:
            self._waves.begin()

    def _add(self, request: EngineRequest) -> None:
        if self._executor.task == "pool":
            if request.limit:
                raise ConfigError(f"request {request.id}: limit is {request.limit}: the model gives vectors; use 0")
            # The cache has no vectors of tokens that it holds.
            request = msgspec.structs.replace(request, params=_WHOLE if self.info.vectors == "token" else _USUAL)
            if self._kept is not None and (vectors := self._kept.find(request)) is not None:
                self._answer(request, vectors)
                return
        if request.items:
            check_items(request, *self._executor.item_input)
        for processor in self._processors:
            self._validate(processor, request.params)
        if request.id in self._compiling:
            raise ConfigError(f"request_id: {request.id!r} is already running; ids must be unique")
        if request.params.structured_outputs is None and not request.params.bad_words:
            self._scheduler.add(request)
            return
        if self.grammars is None:
            raise ConfigError("structured_outputs and bad_words: there is no tokenizer to read them by; leave them out")
        self._scheduler.check(request)
        self._compiling[request.id] = request, self._compiler.submit(self.grammars.constraints, request.params)

    def _answer(self, request: EngineRequest, vectors: bytes) -> None:
        """End a request at once with vectors that were kept."""
        tokens, stats = len(request.prompt), self._stats
        stats.prompt_tokens += tokens
        stats.cached_tokens += tokens
        stats.token_vector_hits += 1
        news = EngineCoreOutput(request.id, [], "length", cached=tokens, scheduled=time.monotonic(), pooled=vectors)
        self._count_end(news.finish_reason)
        self._news.append(news)

    @staticmethod
    def _validate(processor: LogitsProcessor, params: SamplingParams) -> None:
        """Let a processor that is a class refuse a request's parameters."""
        try:
            getattr(processor, "validate_params", lambda params: None)(params)
        except ValueError as wrong:
            raise ConfigError(f"logits_processors: {wrong}") from wrong

    def abort(self, ids: Iterable[str]) -> None:
        """End requests; their last update comes with the next step. Ids that are not known are ignored."""
        ids = list(ids)
        for id in ids:
            if (compiling := self._compiling.pop(id, None)) is not None:
                compiling[1].cancel()
                self._end(EngineCoreOutput(id, [], "abort"))
        for state in self._scheduler.abort(ids):
            self._end(EngineCoreOutput(state.request.id, [], "abort"))

    def _end(self, output: EngineCoreOutput) -> None:
        self._forget(output.id)
        self._count_end(output.finish_reason)
        self._news.append(output)

    def _forget(self, id: str, output: Sequence[int] = ()) -> None:
        if self._proposer is not None:
            self._proposer.end(id, output)
        self._constraints.forget(id)
        self._scored.pop(id, None)
        self._vectors.forget(id)

    def _count_end(self, reason: str | None) -> None:
        self._stats.finished[str(reason)] = self._stats.finished.get(str(reason), 0) + 1

    def step(self) -> list[EngineCoreOutput]:
        """Start the next step and finish the one before it, in a pipeline the one that is as many before it as there
        are stages; news of the latter's requests."""
        with contextlib.nullcontext() if self._waves is None else self._waves.watched():
            return self._step()

    def _step(self) -> list[EngineCoreOutput]:
        if self._compiling:
            self._take_compiled()
        if self._scheduler.adapters.count:
            self._read_adapters()
        output = self._scheduler.next()
        self._adapters.request(self._scheduler.adapters.wanted)
        begun = time.monotonic()
        batch = None if output is None else self._stage(output, begun)
        if self._waves is not None and self._waves.running:
            batch = self._together(self._waves, batch)
        # What verifies drafts of a proposer is ready but for them when the tokens before them come.
        late = self._proposer is not None and output is not None and output.verified > 0
        started = None
        if output is not None and batch is not None and not late:
            started = self._launch(output, batch, begun)
        news, self._news = self._news, []
        for oldest in self._due(output if late or started is not None else None, late or _is_full(started)):
            result = oldest.handle.wait()
            self._measure(oldest)
            news += self._commit(oldest, result)
            if self._proposer is not None:
                self._propose(self._proposer)
        if late and output is not None and batch is not None:
            started = self._launch(*self._with_drafts(output, batch), begun)
        if started is not None:
            if started.batch.full:
                self._sample(started)
            for command in after_step(started.output):
                self._executor.do(command)
            self._in_flight.append(started)
        return news

    def _due(self, next_step: SchedulerOutput | None, known: bool) -> Iterator[_InFlight]:
        """The steps whose results are taken now: the oldest one where no next step begins, else those for which there
        is no place beside it. known: it begins, or is sampled from, when all tokens of its requests are."""
        most = len(self._in_flight) - 1 if next_step is None else self._depth - 1
        if next_step is not None and known:
            most = min(most, next_step.num_independent)
        while len(self._in_flight) > max(most, 0):
            yield self._in_flight.popleft()

    def _together(self, waves: CoreWaves, batch: Batch | None) -> Batch | None:
        """A step as all cores make it, padded to the tokens of the largest one. One of padding alone starts here."""
        step = None if batch is None else batch.step
        mixed = step is not None and not step.query_len
        busy = self._scheduler.unfinished + len(self._compiling) > 0
        agreed = waves.agree(0 if step is None else step.tokens, mixed, busy)
        if batch is None or step is None:
            if agreed.tokens:
                nothing = _NOTHING._replace(pad_to=agreed.tokens, query_len=0 if agreed.mixed else 1)
                task = self._executor.task
                self._executor.start(nothing, "plain" if task == "generate" else task)
            return None
        query_len = 0 if agreed.mixed else step.query_len
        return batch._replace(step=step._replace(pad_to=agreed.tokens, query_len=query_len))

    def _take_compiled(self) -> None:
        if not self._scheduler.unfinished and not self._in_flight:
            futures = [f for _, f in self._compiling.values()]
            concurrent.futures.wait(futures, timeout=_WAIT, return_when=concurrent.futures.FIRST_COMPLETED)
        for id, (request, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[id]
                try:
                    self._constraints.add(id, *future.result())
                    self._scheduler.add(request)
                except ConfigError as mistake:
                    self._end(EngineCoreOutput(id, [], "error", error=str(mistake), mistake=True))

    def _read_adapters(self) -> None:
        """Take in adapters that have been read, and have those read that requests wait for."""
        table = self._scheduler.adapters
        wanted = table.wanted
        if wanted and not self._scheduler.running and not self._in_flight:
            self._adapters.wait(_WAIT)
        for digest, error in self._adapters.take([adapter.digest for adapter in wanted]).items():
            for state in self._scheduler.fail_adapter(digest, error):
                self._end(EngineCoreOutput(state.request.id, [], "error", error=error))
        table.in_memory = self._adapters.digests

    def _propose(self, proposer: Proposer) -> None:
        """Ask for the drafts of all that run."""
        requests, most = self._scheduler.requests, self._scheduler.most_drafts
        if self._scheduler.acceptance.off(len(requests.running)):
            return
        for state in requests.running:
            if state.output:
                request = state.request
                drafts = list(proposer.propose(request.id, request.prompt, state.output, most))
                if any(not 0 <= token < self._executor.vocab for token in drafts):
                    raise ConfigError(
                        f"draft_proposer: {type(proposer).__name__} proposed {drafts}; not all of these are tokens"
                    )
                self._scheduler.propose(state, drafts[:most])

    @staticmethod
    def _with_drafts(output: SchedulerOutput, batch: Batch) -> tuple[SchedulerOutput, Batch]:
        """A step that was planned and staged before its drafts were known, and is now complete."""
        v, q = output.verified, output.query_len
        drafts = np.full((v, q - 1), -1, dtype=np.int32)
        for row, state in zip(drafts, output.requests[:v], strict=True):
            expected = state.drafts[: q - 1]
            row[: len(expected)] = expected
        ids = batch.step.arrays["token_ids"].copy()
        ids[: v * q].reshape(v, q)[:, 1:] = drafts.clip(min=0)
        step = batch.step._replace(arrays={**batch.step.arrays, "token_ids": ids})
        return output._replace(drafts=drafts), batch._replace(step=step)

    def _stage(self, output: SchedulerOutput, begun: float) -> Batch:
        """Prepare a step, and have the device do what comes before it."""
        requests = self._scheduler.requests
        for state in output.admitted:
            id, request = state.request.id, state.request
            state.scheduled = state.scheduled or begun
            begun_states: dict[str, np.ndarray] = {}
            if self._table.admit(state, always_masked=id in self._constraints or request.thinking is not None):
                bias = request.params.logit_bias or {}
                begun_states = self._table.states(request.prompt, state.output, bias)
            if length := self._executor.layout.history:
                begun_states["history"] = history(request.prompt, state.output, length)
            if begun_states:
                self._executor.do(WriteEntry(state.slot, begun_states))
            requests.verifiable[state.slot] = self._verifies
        for command in before_step(output, self._adapters):
            self._executor.do(command)
        for moves in self._balancer.next() if self._balancer is not None else ():
            self._executor.do(moves)
        batch = self._table.stage(output, requests, self._executor.layout, bool(self._processors))
        if self._providers:
            arrays = batch.step.arrays
            arrays = {**arrays, **provide(self._providers, output, requests, arrays)}
            batch = batch._replace(step=batch.step._replace(arrays=arrays))
        return batch

    def _launch(self, output: SchedulerOutput, batch: Batch, begun: float) -> _InFlight:
        requests = self._scheduler.requests
        self._stats.steps += 1
        task = self._executor.task
        program = task if task != "generate" else "full" if batch.full else "plain"
        # Whoever masks or edits the rows behind drafts must know them.
        known = self._executor.device_drafts and (bool(self._processors) or self._table.masking(requests.order))
        asked = {"drafts": True} if known else {}
        return _InFlight(output, batch, self._executor.start(batch.step, program, **asked), begun)

    def _measure(self, step: _InFlight) -> None:
        """Count a step whose result has just come. Its time begins where that of the step before it ended, if that was
        later than its own start: the host had both in flight until then."""
        now = time.monotonic()
        bucket, tokens = self._stats.buckets[step.handle.size.bucket.name], step.batch.step.tokens
        bucket.seconds.observe(now - max(step.begun, self._ended))
        bucket.tokens += tokens
        bucket.padding += step.handle.size.T - tokens
        if query_len := step.batch.step.query_len:
            seconds = now - max(step.begun, self._ended)
            self._scheduler.acceptance.timed(query_len, step.batch.step.sequences, seconds)
        self._stats.step_tokens.observe(tokens)
        self._ended = now

    def _sample(self, started: _InFlight) -> None:
        output, rows = started.output, started.batch.rows
        mask = np.full((len(rows.masked), self._table.words), -1, dtype=np.int32) if len(rows.masked) else None
        if mask is not None:
            entries = rows.entry[rows.masked]
            first = np.flatnonzero(np.diff(entries, prepend=-1))  # the masked rows of an entry are its first ones
            for at, end in zip(first, [*first[1:], len(mask)], strict=True):
                state = output.requests[entries[at]]
                if state.finish_reason is None:  # else it ended with the step before; its rows are not looked at
                    entry = int(entries[at])
                    self._mask(state, mask[at:end], self._drafts_of(started, entry), self._tree_of(started, entry))
        whole = [int(r) for r in np.flatnonzero(rows.wanted >= 0) if self._wants_all(started, int(r))]
        self._executor.sample(started.handle, mask, bool((rows.wanted >= 0).any()), whole, self._hook(started))

    def _mask(self, state: RequestState, masks: np.ndarray, drafts: Sequence[int], tree: TokenTree | None) -> None:
        """Write the masks of a request's rows; one whose grammar fails ends."""
        try:
            self._constraints.write(state, masks, drafts, tree)
        except ConstraintError as problem:
            self._scheduler.fail(state, str(problem), mistake=True)
            self._end(EngineCoreOutput(state.request.id, [], "error", error=str(problem), mistake=True))

    def _drafts_of(self, started: _InFlight, entry: int) -> list[int]:
        """The drafts that a step verifies of an entry, none of one that does not."""
        output = started.output
        if entry >= output.verified:
            return []
        drafts = self._device_drafts[output.slots[entry]] if output.drafts is None else output.drafts[entry]
        found: list[int] = drafts[: output.query_len - 1].tolist()
        return found

    def _tree_of(self, started: _InFlight, entry: int) -> TokenTree | None:
        """The tree of these drafts, None where they are one run."""
        tree = self._executor.layout.tree
        if isinstance(tree, DynamicTree):
            verified = entry < started.output.verified
            return of_parents(self._device_parents[started.output.slots[entry]].tolist()) if verified else None
        return tree

    def _wants_all(self, started: _InFlight, row: int) -> bool:
        rows = started.batch.rows
        params = started.output.requests[rows.entry[row]].request.params
        inside = bool(rows.sample_index[row] < 0)
        return self._unranked(params, inside) > 0 or (not inside and params.logprob_token_ids is not None)

    def _unranked(self, params: SamplingParams, inside: bool) -> int:
        """How many log-probabilities a row wants where a step finds fewer, else 0. inside: of the prompt."""
        wanted = (params.prompt_logprobs if inside else params.logprobs) or 0
        return self._executor.vocab if wanted == -1 else wanted if wanted > self._ranked else 0

    def _hook(self, started: _InFlight) -> Callable[[torch.Tensor], None] | None:
        if not self._processors:
            return None
        rows, told = started.batch.rows, []
        for entry, place, index in zip(rows.entry.tolist(), rows.place.tolist(), rows.sample_index, strict=True):
            state = started.output.requests[entry]
            before = self._drafts_of(started, entry)[:place] if place else []
            if before and (tree := self._tree_of(started, entry)) is not None:
                before = [draft for i, draft in enumerate(before, 1) if tree.ancestors[place] >> i & 1]
            # What is sampled behind a draft that there is not does not count.
            output = [*state.output, *itertools.takewhile(lambda draft: draft >= 0, before)]
            params = state.request.params
            extra = dict(params.extra_args or {})
            told.append(Row(state.request.id, state.request.prompt, output, extra, params, bool(index < 0)))

        def edit(logits: torch.Tensor) -> None:
            for processor in self._processors:
                processor(logits, told)

        return edit

    def _commit(self, step: _InFlight, result: StepResult) -> list[EngineCoreOutput]:
        scores = self._scores(step, result) if step.batch.full else {}
        kept = result.outputs["kept"] if step.output.verified else None
        self._device_drafts = result.outputs.get("drafts", self._device_drafts)
        self._device_parents = result.outputs.get("tree_parents", self._device_parents)
        pooled = result.outputs.get("pooled")
        rows = int(step.output.rows.sum())
        tokens = result.tokens if pooled is None else np.zeros(rows, dtype=np.int32)  # never given
        told = result.outputs.get("drafted"), result.outputs.get("runs")
        committed = self._scheduler.commit(step.output, tokens, kept, *told)
        news = [
            EngineCoreOutput(s.request.id, tokens)
            for s, tokens in zip(committed.requests, committed.tokens, strict=True)
        ]
        if pooled is not None:
            self._vectors.give(step.output, pooled, news)
        for i in range(len(news)) if step.batch.full else committed.events:
            self._complete(news[i], committed.requests[i], scores)
        self._stats.generated_tokens += sum(map(len, committed.tokens))
        if (counted := result.outputs.get("expert_tokens")) is not None:
            before = 0 if self._expert_tokens is None else self._expert_tokens
            self._expert_tokens = before + counted.astype(np.int64)
            if self._balancer is not None:
                self._balancer.count(counted)
        return news

    def _complete(
        self, output: EngineCoreOutput, state: RequestState, scores: dict[str, list[PositionLogprobs]]
    ) -> None:
        """What an output holds beside its tokens: log-probabilities, the prompt's figures with the first, the end."""
        request = state.request
        began = len(state.output) == len(output.tokens)
        if request.id in self._constraints and state.finish_reason != "error":
            self._advance(state, output.tokens)
        if request.params.logprobs is not None:
            output.logprobs = scores.get(output.id, [])[: len(output.tokens)]
        if began:
            output.cached, output.scheduled = state.cached_tokens, state.scheduled
            output.prompt_logprobs = self._scored.pop(request.id, None)
            self._stats.prompt_tokens += len(request.prompt)
            self._stats.cached_tokens += state.cached_tokens
        if state.finish_reason is not None:
            output.finish_reason, output.stop_reason = state.finish_reason, state.stop_reason
            output.error, output.mistake = state.error, state.mistake
            output.draft_tokens, output.accepted_tokens = state.draft_tokens, state.accepted_tokens
            if state.finish_reason == "error" and output.error is None:
                output.error = _NO_TOKEN
            if self._kept is not None and output.pooled:
                self._kept.keep(request, output.pooled)
            self._count_end(output.finish_reason)
            self._forget(request.id, state.output)

    def _advance(self, state: RequestState, tokens: list[int]) -> None:
        """Tell a request's grammar its new tokens; one that cannot go on ends the request. What was accepted behind the
        grammar's end is dropped."""
        # One that a stop token has ended needs to know of the tokens before that only.
        new = tokens[:-1] if state.finish_reason == "stop" else tokens
        try:
            count = self._constraints.advance(state, new)
        except ConstraintError as problem:
            self._scheduler.fail(state, str(problem), mistake=True)
            return
        if count is not None:
            del state.output[len(state.output) - len(tokens) + count :], tokens[count:]
            state.stop_reason = None
            self._scheduler.end(state, "stop")

    def _scores(self, step: _InFlight, result: StepResult) -> dict[str, list[PositionLogprobs]]:
        """Log-probabilities of the step's sampled tokens by request; those inside prompts are put aside."""
        found: dict[str, list[PositionLogprobs]] = {}
        rows = step.batch.rows
        scores = result.outputs.get("scores")
        if scores is None:
            return found
        for row in np.flatnonzero(rows.wanted >= 0):
            state = step.output.requests[rows.entry[row]]
            if state.finish_reason is not None:
                continue
            inside = rows.sample_index[row] < 0
            token = int(step.batch.step.arrays["target"][row]) if inside else int(result.tokens[row])
            params = state.request.params
            named = () if inside else params.logprob_token_ids or ()
            whole = result.whole.get(int(row))
            most = self._unranked(params, bool(inside))
            ranked = _ranked(token, scores[row], most or int(rows.wanted[row]), whole if most else None)
            if named and whole is not None:
                ranked.named = [(i, float(whole[i]), 1 + int(np.count_nonzero(whole > whole[i]))) for i in named]
            (self._scored if inside else found).setdefault(state.request.id, []).append(ranked)
        return found

    def stats(self) -> CoreStats:
        """Gauges and counters as of now."""
        scheduler, stats = self._scheduler, self._stats
        stats.running, stats.waiting = scheduler.running, scheduler.waiting + len(self._compiling)
        stats.free_blocks = self._pool.free_blocks
        stats.kv_usage = 1 - stats.free_blocks / max(stats.total_blocks, 1)
        stats.prefix_queries, stats.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        stats.preemptions = scheduler.preemptions
        stats.expert_tokens = [] if self._expert_tokens is None else self._expert_tokens.tolist()
        if self._balancer is not None:
            stats.expert_moves, stats.expert_balancedness = self._balancer.moved, self._balancer.balancedness()
        drafted = scheduler.acceptance
        stats.drafts, stats.draft_tokens, stats.accepted_tokens = (
            drafted.drafts, drafted.draft_tokens, drafted.by_position.tolist()
        )  # fmt: skip
        stats.max_adapters = scheduler.adapters.count if self.info.adapted else 0
        stats.adapters_running, stats.adapters_waiting = scheduler.adapter_names()
        stats.token_vector_bytes = self._kept.size if self._kept is not None else 0
        return copy.deepcopy(stats)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing done, while requests hold some."""
        done = self._scheduler.cache.reset()
        if done:
            self._scheduler.items.reset()
            if self._kept is not None:
                self._kept.clear()
        return done

    def collective_rpc(self, call: Call, timeout: float | None = None) -> list[Any]:
        """What a function returns on every rank, between two steps. Raises RankCallError when a rank could not,
        RankError when one is gone, or takes longer than ``timeout`` seconds."""
        return values(self._executor.ask(call, timeout))

    def warm_up(self) -> bool:
        """Run a step of a bucket that is still cold, while no request is there; whether there are more."""
        if self._cold:
            self._executor.warm_up(self._cold.pop(0))
        return bool(self._cold)

    def check_health(self) -> None:
        """Raise what a step would raise because a process that it needs is gone."""
        self._executor.check_health()
        if self._waves is not None:
            self._waves.check()

    def write_adapter(self, digest: str, values: Mapping[str, np.ndarray]) -> None:
        """Have requests whose adapter has this digest read these tables, by the names of their states; a table is zero
        but for the beginning that is given. Raises ConfigError for what no table can hold."""
        self._adapters.put(digest, adapter_tables(self._executor, digest, values))

    def export_cache(self, request: EngineRequest) -> list[CacheEntry]:
        """What the cache has of a request's prompt: blocks up to its last block boundary, and the snapshot there."""
        return export_prefix(self._executor, self._scheduler.cache, request)

    def import_cache(self, entries: Sequence[CacheEntry]) -> int:
        """Have requests find what another core exported, one with the same artifact and ``cache_secret``; how many of
        the entries were new. Raises ConfigError."""
        return import_prefix(self._executor, self._scheduler.cache, entries)

    def close(self) -> None:
        """Finish the step in flight and stop the threads. Nobody wants to know of that step any more, nor of its
        failure."""
        with contextlib.suppress(Exception):
            while self._in_flight:
                self._in_flight.popleft().handle.wait()
        self._compiler.shutdown(cancel_futures=True)
        self._adapters.close()
        self._executor.close()
        if self._waves is not None:
            self._waves.close()


def _is_full(step: _InFlight | None) -> bool:
    return step is not None and step.batch.full


def _no_files(adapter: Adapter) -> NoReturn:
    raise ConfigError(f"adapter {adapter.name!r}: this engine reads no adapters from files; give its tables")


def _ranked(token: int, scores: np.ndarray, wanted: int, whole: np.ndarray | None) -> PositionLogprobs:
    """One row of `token_logprobs`. whole: log-probabilities of the vocabulary, where it has fewer than are wanted."""
    logprob, rank = float(scores[0]), int(scores[1])
    if whole is not None:
        order = np.argsort(-whole, kind="stable")[:wanted]
        return PositionLogprobs(token, logprob, rank, order.tolist(), whole[order].tolist())
    k = (len(scores) - 2) // 2
    values, ids = scores[2 : 2 + wanted], scores[2 + k : 2 + k + wanted]
    return PositionLogprobs(token, logprob, rank, ids.astype(np.int32).tolist(), values.tolist())
