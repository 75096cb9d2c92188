"""Part: what a capability does at the moments of a step. `EngineCore` has a literal list of them.

A package offers a part of its own under the entry point group ``graphllm.parts``; `Part.after` names the part that it
follows. Nothing else is edited for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from graphllm.config import ConfigError, SchedulerConfig, SleepConfig, SpeculationConfig, TierConfig
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput, EngineRequest
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import SchedulerLimits, SchedulerOutput
from graphllm.engine.step.batch import Batch, SamplingTable
from graphllm.engine.step.started_step import LogitsEdit, StartedStep
from graphllm.engine.step.step_executor import StepExecutor, Successor
from graphllm.runtime.commands.command import Command

if TYPE_CHECKING:
    from graphllm.engine.experts.expert_balancer import ExpertBalancer
    from graphllm.engine.experts.lockstep import CoreWaves
    from graphllm.engine.requests.options import LogitsProcessor
    from graphllm.engine.step.adapter_memory import AdapterMemory
    from graphllm.engine.structured.compilers import GrammarCompilers
    from graphllm.runtime.step_handle import StepResult

_NO_SPECULATION, _NO_SLEEP, _NO_TIERS = SpeculationConfig(), SleepConfig(), TierConfig()
Kept = Literal["device", "process", "everywhere"]
GROUP = "graphllm.parts"
WAIT = 0.05  # seconds that a step without work waits for what requests are held back for


@dataclass(frozen=True)
class CoreSetup:
    """What a core is given for its parts.

    grammars: compiles structured outputs; None without a tokenizer.
    processors: edit logits, see docs/logits-processors.md.
    speculation: the settings of drafts.
    adapters: reads the files of adapters; None: tables are given.
    balancer: says which experts move; None where they do not.
    waves: of the cores that step together with this one; None for a single core.
    successor: waits for better programs; None where the engine keeps what it has.
    sleep: whether the core can sleep.
    tiers: the settings of the cache's tiers.
    rank: number of this core among those of the engine.
    identity: of all that a block holds in addition to its tokens: engines with equal ones may exchange blocks.
    """

    grammars: GrammarCompilers | None = None
    processors: Sequence[LogitsProcessor] = ()
    speculation: SpeculationConfig = _NO_SPECULATION
    adapters: AdapterMemory | None = None
    balancer: ExpertBalancer | None = None
    waves: CoreWaves | None = None
    successor: Successor | None = None
    sleep: SleepConfig = _NO_SLEEP
    tiers: TierConfig = _NO_TIERS
    rank: int = 0
    identity: str = ""


NOTHING_MORE = CoreSetup()


@dataclass(frozen=True)
class PartContext:
    """What a part is made of.

    executor, scheduler, limits: of the core.
    table: sampling parameters by slot.
    stats: counters that `EngineCore.stats` gives.
    options, setup: as the core was given them.
    """

    executor: StepExecutor
    scheduler: Scheduler
    limits: SchedulerLimits
    table: SamplingTable
    stats: CoreStats
    options: SchedulerConfig
    setup: CoreSetup


class Part:
    """A capability. Every method has an empty default and runs in the core's thread, in the order of the list.

    name: by which other parts place themselves.
    after: the part that one from outside follows.
    edits_logits: every step stops at its logits, for `edit`.
    held: requests that are kept back, see `receive`.
    busy: the core must step even without requests.
    wakeup_fd: can be read when the core must step; None without one.
    resource: what requests need to join a step; None for nothing.
    """

    name: ClassVar[str] = ""
    after: ClassVar[str] = ""
    edits_logits: bool = False
    held: int = 0
    busy: bool = False
    wakeup_fd: int | None = None
    resource: Resource | None = None

    def __init__(self, context: PartContext) -> None:
        self.context = context

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        """Whether an engine has this part. Raises ConfigError for settings that do not go together."""
        return True

    # A request comes and goes.

    def receive(self, request: EngineRequest) -> EngineRequest | EngineCoreOutput | None:
        """A request comes: the request for the next part, or an output that answers it at once, or None: it is held
        back until `gather` gives it. Raises ConfigError for one that cannot run."""
        return request

    def added(self) -> None:
        """A request was taken."""

    def gather(self, idle: bool) -> Iterable[EngineRequest | EngineCoreOutput]:
        """Before a step is planned: requests that are held back no more, and outputs of those that ended. idle: nothing
        runs, so there is time to wait a little."""
        return ()

    def abort(self, id: str) -> bool:
        """Drop a request that is held back; whether it was."""
        return False

    def admit(self, state: RequestState) -> Mapping[str, np.ndarray]:
        """A request gets a slot: what states of the slot begin with, by name."""
        return {}

    def end(self, id: str, output: Sequence[int]) -> None:
        """A request has ended, with this output; nothing of one that was aborted."""

    # A step is planned, launched, and has its result.

    def planned(self, plan: SchedulerOutput | None) -> None:
        """The next step was planned; None: there is none."""

    def before(self, plan: SchedulerOutput) -> Iterable[Command]:
        """What the device does before the step."""
        return ()

    def adjust(self, batch: Batch | None) -> Batch | None:
        """The batch as it is launched; None: there is none."""
        return batch

    def is_late(self, plan: SchedulerOutput) -> bool:
        """Whether the step can be completed only when the results of all steps before it are there."""
        return False

    def complete_late(self, plan: SchedulerOutput, batch: Batch) -> tuple[SchedulerOutput, Batch]:
        """A late step, now complete."""
        return plan, batch

    def edit(self, step: StartedStep, edit: LogitsEdit) -> Iterable[EngineCoreOutput]:
        """A step stands at its logits, and all tokens before it are known: add to ``edit``. Outputs of requests that
        ended here."""
        return ()

    def started(self, step: StartedStep) -> Iterable[Command]:
        """What the device does after a step that was launched whole."""
        return ()

    def arrived(self, step: StartedStep, result: StepResult) -> None:
        """A step has its result; its requests do not know of it yet."""

    def commit(
        self, step: StartedStep, result: StepResult, news: Sequence[tuple[RequestState, EngineCoreOutput]]
    ) -> Iterable[int]:
        """A step's tokens were given to its requests. news: of each request that got some or ended. The indexes of
        requests that this part has ended or changed."""
        return ()

    def complete(self, state: RequestState, output: EngineCoreOutput) -> None:
        """An output is about to leave that begins or ends a request, or that comes of a step with `edit`."""

    def committed(self) -> None:
        """All requests know their newest tokens."""

    # The core as a whole.

    def explain(self, failure: RuntimeError) -> Exception:
        """Why a step has failed, where this part knows it better."""
        return failure

    def hear(self) -> None:
        """`wakeup_fd` can be read."""

    def check_health(self) -> None:
        """Raise what a step would raise because a process that it needs is gone."""

    def stats(self, into: CoreStats) -> None:
        """Fill in gauges and counters as of now."""

    def leave(self) -> None:
        """The device is about to forget what it keeps for later requests, which may be kept elsewhere."""

    def reset(self, where: Kept) -> None:
        """Forget what is kept for later requests: on the device, in the memory of this process, too, or everywhere."""

    def close(self) -> None:
        """Stop threads; no step follows."""


MOMENTS = tuple(
    name for name, value in vars(Part).items() if callable(value) and not name.startswith("_") and name != "applies"
)


def make_parts(own: Sequence[type[Part]], context: PartContext) -> list[Part]:
    """The parts that apply: the literal list with what packages offer, each after the part that it names. Raises
    ConfigError for one that names none."""
    kinds = list(own)
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        kind: Any = entry.load()
        at = next((i for i, other in enumerate(kinds) if other.name == kind.after), None)
        if at is None:
            names = ", ".join(other.name for other in own)
            raise ConfigError(f"part {entry.name!r} comes after {kind.after!r}, which there is not; parts are {names}")
        kinds.insert(at + 1, kind)
    return [kind(context) for kind in kinds if kind.applies(context)]


class Moments:
    """For each moment, the methods of the parts that do something then, in order: ``moments.before`` and so on."""

    def __init__(self, parts: Sequence[Part]) -> None:
        for name in MOMENTS:
            usual = getattr(Part, name)
            doing = [getattr(part, name) for part in parts if getattr(type(part), name) is not usual]
            setattr(self, name, tuple(doing))

    def __getattr__(self, name: str) -> tuple[Any, ...]:  # for the type checker: all are set above
        raise AttributeError(name)
