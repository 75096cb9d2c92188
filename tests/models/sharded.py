"""An artifact of several ranks in one process: each rank's executor with its share of the weights, in a thread of its
own, and a group that adds up and gathers between them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from graphllm.ir.groups import TENSOR, set_group
from graphllm.program.artifact import Artifact
from graphllm.runtime.commands.command import Command
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import Sampling, StepInput
from graphllm.runtime.step_handle import StepResult
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan
from tests.waiting import PATIENCE


class ThreadGroup:
    """A group of threads. They say which rank they are by `be`."""

    def __init__(self, size: int) -> None:
        self.size, self._own = size, threading.local()
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._meeting = threading.Barrier(size, timeout=PATIENCE)
        self.calls = 0

    @property
    def rank(self) -> int:
        return int(self._own.rank)

    def be(self, rank: int) -> None:
        self._own.rank = rank

    def abort(self) -> None:
        self._meeting.abort()

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        parts = self._exchange(x)
        out.copy_(torch.stack([p.to(torch.promote_types(p.dtype, torch.float32)) for p in parts]).sum(0))
        self._meeting.wait()

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        out.copy_(torch.cat(self._exchange(x), -1)[..., : out.shape[-1]])
        self._meeting.wait()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._given[self.rank] = x
        self.calls += self.rank == 0
        self._meeting.wait()
        assert len({p.shape for p in self._given}) == 1
        return list(self._given)


class Sharded:
    """An artifact's ranks; a context manager, one at a time. It stands in for an `Executor` where plain steps run."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, degree: int, num_blocks: int) -> None:
        artifact = Artifact.open(folder)
        plan = WeightPlan.from_json((folder / "weights.json").read_text())
        self.group = ThreadGroup(degree)
        self.weights = [load_weights(plan, checkpoint, rank=rank) for rank in range(degree)]
        self.ranks = [Executor(artifact, w, num_blocks, threads=1) for w in self.weights]
        self.layout, self.vector = self.ranks[0].layout, self.ranks[0].vector
        for rank, executor in enumerate(self.ranks):
            executor.stream.submit(lambda rank=rank: self.group.be(rank)).result()  # type: ignore[misc]
        set_group(TENSOR, self.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: object, trace: TracebackType | None) -> None:
        set_group(TENSOR, None)
        for executor in self.ranks:
            executor.close()

    def do(self, command: Command) -> None:
        for executor in self.ranks:
            executor.do(command)

    def run(self, step: StepInput) -> StepResult:
        """Rank 0's result. That of all ranks is the same."""

        def one(executor: Executor) -> Any:
            try:
                if executor.task != "generate":
                    return executor.run(step)
                handle = executor.start(step, "full")  # the plain program has no logits of all tokens
                executor.sample(handle, Sampling())
                return handle.wait()
            except BaseException:
                self.group.abort()
                raise

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            results = list(pool.map(one, self.ranks))
        first = "tokens" if "tokens" in results[0].outputs else "pooled"
        assert all((r.outputs[first] == results[0].outputs[first]).all() for r in results)
        return results[0]
