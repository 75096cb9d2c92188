"""EngineCore: the step loop. Requests of token ids go in, new tokens come out.

The host runs one step later than the device.

A step is planned and started before the tokens of the one before it are known; they reach it on the device. Where a
request's choice of tokens depends on them (a grammar, bad words), the step stops at its logits until the host has seen
them. What a capability does at the moments of a step lies in a part (`graphllm.engine.parts`); `PARTS` lists them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphllm.config import Bucket, ConfigError, SchedulerConfig
from graphllm.config.compilation import ranked_logprobs
from graphllm.engine.parts.adapters import Adapters
from graphllm.engine.parts.drafts import Drafts
from graphllm.engine.parts.events import Events
from graphllm.engine.parts.experts import Experts
from graphllm.engine.parts.grammars import Grammars
from graphllm.engine.parts.items import Items
from graphllm.engine.parts.lockstep import Lockstep
from graphllm.engine.parts.logits_processors import LogitsProcessors
from graphllm.engine.parts.logprobs import Logprobs
from graphllm.engine.parts.part import NOTHING_MORE, CoreSetup, Moments, Part, PartContext, make_parts
from graphllm.engine.parts.sleep import Sleep
from graphllm.engine.parts.snapshots import Snapshots
from graphllm.engine.parts.takeover import Takeover
from graphllm.engine.parts.tiers import Tiers
from graphllm.engine.parts.vectors import Vectors
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput, EngineRequest
from graphllm.engine.schedule.scheduler_class import scheduler_class
from graphllm.engine.schedule.scheduler_output import DraftResults, SchedulerOutput
from graphllm.engine.step.batch import Batch, SamplingTable
from graphllm.engine.step.core_info import core_info, scheduler_limits
from graphllm.engine.step.news import News
from graphllm.engine.step.providers import find_providers, provide
from graphllm.engine.step.started_step import LogitsEdit, StartedStep
from graphllm.engine.step.step_executor import StepExecutor
from graphllm.engine.step.step_meter import StepMeter
from graphllm.runtime.commands.calls import Call, values
from graphllm.runtime.commands.states import WriteEntry
from graphllm.runtime.memory.staging import Sampling

if TYPE_CHECKING:
    from graphllm.engine.structured.compilers import GrammarCompilers
    from graphllm.runtime.step_handle import StepResult

PARTS: tuple[type[Part], ...] = (
    Sleep, Drafts, Grammars, LogitsProcessors, Logprobs, Adapters, Items, Tiers, Snapshots, Vectors, Experts, Events,
    Lockstep, Takeover,
)  # fmt: skip
_Kind = TypeVar("_Kind", bound=Part)


class EngineCore:
    """Feeds one executor.

    max_len: tokens of prompt and output together.
    setup: what parts are made of.
    pipeline_depth: steps that the executor runs at once, in the stages of a pipeline.
    min_batch_per_stage: a step with fewer sequences is not split over the stages.
    cold: buckets that have not run a step yet; `warm_up` runs one.
    scheduler, executor, parts: what the core drives; see `PartContext`.
    """

    def __init__(
        self,
        executor: StepExecutor,
        max_len: int,
        options: SchedulerConfig,
        setup: CoreSetup = NOTHING_MORE,
        pipeline_depth: int = 1,
        min_batch_per_stage: int = 1,
        cold: Iterable[Bucket] = (),
    ) -> None:
        self.executor, self._cold = executor, list(cold)
        limits = scheduler_limits(executor, options, max_len, pipeline_depth, min_batch_per_stage)
        caching = options.enable_prefix_caching and executor.shareable
        self.scheduler = scheduler_class(options)(limits, executor.layout, caching, options.cache_secret)
        self._table = SamplingTable(executor.max_num_seqs, executor.vocab, ranked_logprobs(executor.max_logprobs))
        self._providers = find_providers(executor.inputs.values())
        self._meter = StepMeter(executor)
        context = PartContext(executor, self.scheduler, limits, self._table, self._meter.stats, options, setup)
        self.parts = make_parts(PARTS, context)
        self.scheduler.admission.resources = [part.resource for part in self.parts if part.resource is not None]
        self._at = Moments(self.parts)
        self._holding = [p for p in self.parts if type(p).held is not Part.held or type(p).busy is not Part.busy]
        self._edits_logits = any(part.edits_logits for part in self.parts)
        self._in_flight: collections.deque[StartedStep] = collections.deque()
        self._depth = pipeline_depth  # steps that are started before the first of them is waited for
        self._news = News(self._at.complete, self._at.end, self._meter)
        self.info = core_info(executor, max_len, self.scheduler.capacity)

    def part(self, kind: type[_Kind]) -> _Kind:
        """The part of a kind. Raises ConfigError where the engine has none."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        raise ConfigError(f"this engine has no {kind.name.replace('_', ' ')}")

    @property
    def grammars(self) -> GrammarCompilers | None:
        """Compiles structured outputs; None where there is no tokenizer."""
        return next((part.compilers for part in self.parts if isinstance(part, Grammars)), None)

    @property
    def kernels_done(self) -> int:
        """How many kernels have run, as far as the host can tell; any thread may ask."""
        return self.executor.kernels_done

    @property
    def unfinished(self) -> int:
        """Requests that are not done, and news not yet fetched."""
        more = sum([part.held + part.busy for part in self._holding])
        return self.scheduler.unfinished + len(self._news) + bool(self._in_flight) + more

    @property
    def wakeup_fd(self) -> int | None:
        """A file descriptor that can be read when another core wants this one to step; see `hear`."""
        return next((part.wakeup_fd for part in self.parts if part.wakeup_fd is not None), None)

    def hear(self) -> None:
        """`wakeup_fd` can be read."""
        for hear in self._at.hear:
            hear()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ConfigError, QueueFullError when the queue is."""
        found: EngineRequest | EngineCoreOutput | None = request
        for receive in self._at.receive:
            found = receive(found)
            if not isinstance(found, EngineRequest):
                break
        if isinstance(found, EngineRequest):
            self.scheduler.add(found)
        elif found is not None:
            self._news.answer(found)
        for added in self._at.added:
            added()

    def abort(self, ids: Iterable[str]) -> None:
        """End requests; their last update comes with the next step. Ids that are not known are ignored."""
        ids = list(ids)
        for id in ids:
            if any(abort(id) for abort in self._at.abort):
                self._news.end(EngineCoreOutput(id, [], "abort"))
        for state in self.scheduler.abort(ids):
            self._news.end(EngineCoreOutput(state.request.id, [], "abort"))

    def step(self) -> list[EngineCoreOutput]:
        """Start the next step and finish the oldest one in flight; news of the latter's requests."""
        try:
            return self._step()
        except RuntimeError as failure:
            for explain in self._at.explain:
                if (known := explain(failure)) is not failure:
                    raise known from failure
            raise

    def _step(self) -> list[EngineCoreOutput]:
        self._gather()
        plan = self.scheduler.next()
        for planned in self._at.planned:
            planned(plan)
        begun = time.monotonic()
        batch = None if plan is None else self._stage(plan, begun)
        for adjust in self._at.adjust:
            batch = adjust(batch)
        started, late = None, False
        if plan is not None and batch is not None:
            for is_late in self._at.is_late:
                late = late or is_late(plan)
            if not late:
                started = self._launch(plan, batch, begun)
        news = self._news.take()
        full = started is not None and started.batch.full
        for oldest in self._due(plan if late or started is not None else None, late or full):
            result = oldest.handle.wait()
            self._meter.measure(oldest)
            news += self._commit(oldest, result)
            for committed in self._at.committed:
                committed()
        if late and plan is not None and batch is not None:
            for complete in self._at.complete_late:
                plan, batch = complete(plan, batch)
            started = self._launch(plan, batch, begun)
        if started is not None:
            if started.batch.full:
                self._sample(started)
            for follow in self._at.started:
                for command in follow(started):
                    self.executor.do(command)
            self._in_flight.append(started)
        return news

    def _gather(self) -> None:
        """Queue requests that parts have held back, and take the news of those that ended."""
        idle = not self.scheduler.running and not self._in_flight
        for gather in self._at.gather:
            for found in gather(idle):
                if isinstance(found, EngineCoreOutput):
                    self._news.end(found)
                    continue
                try:
                    self.scheduler.add(found)
                except ConfigError as mistake:
                    self._news.end(EngineCoreOutput(found.id, [], "error", error=str(mistake), mistake=True))
                    continue
                for added in self._at.added:
                    added()

    def _due(self, plan: SchedulerOutput | None, known: bool) -> Iterator[StartedStep]:
        """The steps to wait for now. If no step starts, wait for the oldest. Otherwise wait until at most
        `pipeline_depth` - 1 are in flight. known: the next step needs the tokens of all steps before it."""
        most = len(self._in_flight) - 1 if plan is None else self._depth - 1
        if plan is not None and known:
            most = min(most, plan.num_independent)
        while len(self._in_flight) > max(most, 0):
            yield self._in_flight.popleft()

    def _stage(self, plan: SchedulerOutput, begun: float) -> Batch:
        """Prepare a step, and have the device do what comes before it."""
        for state in plan.admitted:
            state.scheduled = state.scheduled or begun
            request, states = state.request, dict[str, np.ndarray]()
            if self._table.admit(state):
                states = self._table.states(request.prompt, state.output, request.params.logit_bias or {})
            for admit in self._at.admit:
                states.update(admit(state))
            if states:
                self.executor.do(WriteEntry(state.slot, states))
        for before in self._at.before:
            for command in before(plan):
                self.executor.do(command)
        requests = self.scheduler.requests
        batch = self._table.stage(plan, requests, self.executor.layout, self._edits_logits)
        if self._providers:
            arrays = batch.step.arrays
            arrays = {**arrays, **provide(self._providers, plan, requests, arrays)}
            batch = batch._replace(step=batch.step._replace(arrays=arrays))
        return batch

    def _launch(self, plan: SchedulerOutput, batch: Batch, begun: float) -> StartedStep:
        self._meter.stats.steps += 1
        task = self.executor.task
        program = task if task != "generate" else "full" if batch.full else "plain"
        # Who masks or edits the rows of drafts must know the drafts.
        asked = {}
        if self.executor.device_drafts:
            known = self._edits_logits or self._table.masking(self.scheduler.requests.order)
            asked = {"drafts": True} if known else {}
        return StartedStep(plan, batch, self.executor.start(batch.step, program, **asked), begun)

    def _sample(self, started: StartedStep) -> None:
        """Go on with a step that stands at its logits."""
        edit = LogitsEdit()
        for output in chain.from_iterable([change(started, edit) for change in self._at.edit]):
            self._news.end(output)
        self.executor.sample(started.handle, Sampling(edit.mask, edit.scores, edit.whole, edit.hook))

    def _commit(self, step: StartedStep, result: StepResult) -> list[EngineCoreOutput]:
        """Give a step's tokens to its requests."""
        for arrived in self._at.arrived:
            arrived(step, result)
        found = result.outputs
        tokens = result.tokens if "tokens" in found else np.zeros(int(step.plan.rows.sum()), dtype=np.int32)
        of_drafts = DraftResults(found.get("kept"), found.get("drafted"), found.get("runs"))
        committed = self.scheduler.commit(step.plan, tokens, of_drafts)
        news = [
            EngineCoreOutput(s.request.id, tokens)
            for s, tokens in zip(committed.requests, committed.tokens, strict=True)
        ]
        touched: Iterable[int] = range(len(news)) if step.batch.full else committed.events
        if self._at.commit:
            pairs = list(zip(committed.requests, news, strict=True))
            changed = {i for commit in self._at.commit for i in commit(step, result, pairs)}
            touched = sorted({*touched, *changed}) if changed else touched
        for i in touched:
            self._news.complete(committed.requests[i], news[i])
        self._meter.stats.generated_tokens += sum(map(len, committed.tokens))
        return news

    def stats(self) -> CoreStats:
        """Gauges and counters as of now."""
        stats = self._meter.read(self.scheduler, sum(part.held for part in self._holding))
        for fill in self._at.stats:
            fill(stats)
        return copy.deepcopy(stats)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing done, while requests hold some."""
        done = self.scheduler.cache.reset()
        for reset in self._at.reset if done else ():
            reset("everywhere")
        return done

    def collective_rpc(self, call: Call, timeout: float | None = None) -> list[Any]:
        """What a function returns on every rank, between two steps. Raises RankCallError when a rank could not,
        RankError when one is gone, or takes longer than ``timeout`` seconds."""
        return values(self.executor.ask(call, timeout))

    def warm_up(self) -> bool:
        """Run a step of a bucket that is still cold, while no request is there; whether there are more."""
        if self._cold:
            self.executor.warm_up(self._cold.pop(0))
        return bool(self._cold)

    def check_health(self) -> None:
        """Raise what a step would raise because a process that it needs is gone."""
        self.executor.check_health()
        for check in self._at.check_health:
            check()

    def write_adapter(self, digest: str, values: Mapping[str, np.ndarray]) -> None:
        """Have requests with the adapter of this digest read these tables; see `Adapters.put`. Raises ConfigError."""
        self.part(Adapters).put(digest, values)

    def close(self) -> None:
        """Finish the step in flight and stop the threads. Nobody wants to know of that step any more, nor of its
        failure."""
        with contextlib.suppress(Exception):
            while self._in_flight:
                self._in_flight.popleft().handle.wait()
        *others, last = [*self._at.close, self.executor.close]
        for close in (*others, last):
            close()
