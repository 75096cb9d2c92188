"""MultiprocExecutor: the executor of rank 0, which has the other ranks repeat whatever it does, in the same order.

Rank 0 lives in the engine core's process, so its results come as from a single executor, and the others' steps cost the
host one write to shared memory. Every rank samples for itself. After a sum over the ranks all have bitwise the same
logits, and random numbers follow from the request's seed. So all choose the same tokens, and no token is sent. This is
checked: every rank makes a checksum of each step's tokens, and rank 0 compares them some steps later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphllm.ir.groups import TENSOR, joined_group
from graphllm.program.artifact import Artifact
from graphllm.program.stages import Stage
from graphllm.runtime.commands.command import Answered, Command, Query, Sent
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.memory import Memory
from graphllm.runtime.memory.staging import Sampling, StepInput
from graphllm.runtime.ranks.all_ranks import AllRanks
from graphllm.runtime.ranks.collectives import send_logits
from graphllm.runtime.ranks.groups import abandon
from graphllm.runtime.ranks.rank_failure import RankError
from graphllm.runtime.ranks.rank_messages import Array, Follow, Loaded, Sample, Serving, Start
from graphllm.runtime.ranks.rank_process import CHECKS, FIRST_CHECK, StepChecks
from graphllm.runtime.step_handle import StepHandle
from graphllm.runtime.stream import CpuStream, Job, Stream, nothing

_LATER = 8  # steps after which all ranks have reported what they sampled
_ENDING = 5.0  # seconds that what runs may take to end after a failure
_AGAIN = 0.01  # seconds until kernels of a GPU, which wait again and again, are let go again
_PATIENCE = 0.25  # seconds of waiting between two looks at whether all ranks live


class MultiprocExecutor(Executor):
    """As `Executor`, for an artifact of several ranks.

    ranks: the others, about to allocate as many blocks.
    joined: the groups that this process has entered, which it leaves in the end.
    """

    def __init__(
        self,
        ranks: AllRanks,
        joined: contextlib.ExitStack,
        artifact: Artifact,
        weights: Mapping[str, torch.Tensor],
        num_blocks: int,
        num_snapshots: int = 0,
        threads: int | None = None,
        stage: Stage | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(artifact, weights, num_blocks, num_snapshots, threads, stage=stage, memory=memory)
        self.ranks, self._joined = ranks, joined
        self.worker.world_size = ranks.degree
        self.rank_seconds: list[dict[str, float]] = []  # of the start of each other rank, by phase
        self.stream.stream = self._watched = _WatchedStream(self.stream.stream, ranks)
        self.stream.announce = lambda keep: ranks.send(Follow(keep))
        self._checks = StepChecks(self.in_flight)
        self._words = [0] * CHECKS
        self._closed = False

    def others_serve(self, loaded: Sequence[Loaded], serving: Sequence[Serving]) -> None:
        """What the other ranks have said of their start; before the first step."""
        for before, after in zip(loaded, serving, strict=True):
            self.rank_seconds.append(before.seconds | after.seconds)
            self.block_bytes.append(after.block_bytes)
            self.snapshot_bytes.append(after.snapshot_bytes)

    def start(self, step: StepInput, program: str = "plain", drafts: bool = False) -> StepHandle:
        """As of one rank."""
        if self._checks.full():
            number, word = self._checks.retire()
            self._words[number % CHECKS] = word
            self._compare(number - _LATER)
        self.ranks.send(Start.of(step, program, drafts))
        handle = super().start(step, program, drafts)
        self._checks.add(handle)
        return handle

    def _compare(self, number: int) -> None:
        """Raise RankError unless all ranks sampled the same in a step."""
        own = self._words[number % CHECKS]
        for rank in range(1, self.ranks.degree) if number > 0 else ():
            word = self.ranks.word(rank, FIRST_CHECK + number % CHECKS)
            if word >> 32 == own >> 32 and word != own:
                raise RankError(f"rank {rank} chose other tokens than rank 0 in step {number}")

    def sample(self, handle: StepHandle, sampling: Sampling) -> None:
        """As of one rank; the hook runs on rank 0 and the others get the logits that it leaves."""
        mask, hook = sampling.mask, sampling.hook
        self.ranks.send(Sample(None if mask is None else Array.of(mask), sampling.scores, hook is not None))

        def edit(logits: torch.Tensor) -> None:
            assert hook is not None
            hook(logits)
            send_logits(logits)

        super().sample(handle, sampling._replace(hook=None if hook is None else edit))

    def do(self, command: Command) -> None:
        """As of one rank."""
        command.check(self)
        self.ranks.send(Sent.of(command))
        command.run(self)

    def ask(self, query: Query, timeout: float | None = None) -> list[Answered]:
        """As of one rank; the answers of the others follow its own."""
        query.check(self)
        self.ranks.send(Sent.of(query))
        return [query.run(self), *self.ranks.answers(Answered, timeout)]

    def check_health(self) -> None:
        """Raise RankError when a rank is gone."""
        self.ranks.fate.check()

    def close(self) -> None:
        """Have all ranks finish, and end their processes. After a failure nobody waits for long: what runs may wait for
        the rank that is gone, on a host that is silent. May be called again."""
        if self._closed:
            return
        self._closed = True
        library, ended = None, True
        if not self.ranks.fate.failed:
            with contextlib.suppress(RankError):
                self.ranks.stop()
        elif self.device.type == "cpu":
            ended = self._watched.has_ended(_ENDING)
        else:
            library, ended = abandon(), self._gone_on(_ENDING)
        if ended:
            super().close()
        if library is not None:
            library.join(_ENDING)
            ended = ended and not library.is_alive()
        if ended:
            self._joined.close()
        self.ranks.close()

    def _gone_on(self, seconds: float) -> bool:
        """Let kernels of this GPU go on that wait for ranks that are gone. Whether all have ended within the time."""
        until, group = time.monotonic() + seconds, joined_group(TENSOR)
        while not (ended := self._watched.has_ended(_AGAIN)) and time.monotonic() < until:
            if group is not None:
                group.let_go()
        return ended


class _WatchedStream:
    """A stream that waits for its jobs only while all ranks live."""

    def __init__(self, stream: Stream, ranks: AllRanks) -> None:
        self._stream, self._ranks = stream, ranks
        if isinstance(stream, CpuStream):
            ranks.fate.ends(stream.let_exit)

    def submit(self, work: Callable[[], Any]) -> Job:
        return _WatchedJob(self._stream.submit(work), self._ranks)

    def has_ended(self, seconds: float) -> bool:
        """Whether its work is done within that time. If not it is left to itself."""
        ended = self._stream.submit(nothing).wait(seconds)
        if not ended and isinstance(self._stream, CpuStream):
            self._stream.abandon()
        return ended

    def close(self) -> None:
        self._stream.close()


class _WatchedJob:
    def __init__(self, job: Job, ranks: AllRanks) -> None:
        self._job, self._ranks = job, ranks

    def wait(self, seconds: float) -> bool:
        return self._job.wait(seconds)

    def result(self) -> Any:
        """Wait until it is done. Raises RankError when a rank is gone before, and what the job raised."""
        while not self._job.wait(_PATIENCE):
            self._ranks.fate.check()
        try:
            return self._job.result()
        except Exception as failure:
            try:
                self._ranks.fate.check_soon()
            except RankError as gone:
                raise gone from failure
            raise
