"""The first stage of a pipeline, in one process, with links that say when: the next step's layers run while the logits
of the step before are still to come, and nothing of the two gets mixed up. And the links themselves, between processes.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from graphllm.ir.groups import set_links
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from graphllm.program.stages import Stage, message_bytes
from graphllm.runtime.executor import Executor
from graphllm.runtime.graphs import GraphPrograms
from graphllm.runtime.memory.staging import StepInput, ragged, stack_tables
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan
from tests.tiers import thorough
from tests.waiting import PATIENCE, until


class SecondStage:
    """What the first stage sees of the second. It gives the logits of a step, in which a token is the likeliest, when
    that is put into ``tokens``."""

    stage, count = 0, 2

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.arrived = threading.Condition()
        self.tokens: list[int] = []
        self.asked = 0  # how often somebody has begun to wait for a token
        self.received = 0  # bytes, the last time
        self.settled = 0

    def send(self, values: Sequence[Tensor], to: Sequence[int]) -> None:
        assert list(to) == [1]
        with self.arrived:
            self.sent += [value.clone() for value in values]
            self.arrived.notify_all()

    def receive(self, values: Sequence[Tensor], origin: int) -> None:
        assert origin == 1
        with self.arrived:
            self.asked += 1
            assert self.arrived.wait_for(lambda: self.tokens, PATIENCE)
            token = self.tokens.pop(0)
        self.received = sum(value.nbytes for value in values)
        for value in values:
            value.zero_()
            value[..., token] = 9.0

    def reserve(self, sent: int, received: int) -> None:
        self.reserved = sent, received

    def settle(self) -> None:
        self.settled += 1

    def give(self, token: int) -> None:
        with self.arrived:
            self.tokens.append(token)
            self.arrived.notify_all()

    def wait(self, count: int) -> None:
        """Until so many values have been sent."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.sent) >= count, PATIENCE)


@pytest.fixture
def second() -> Iterator[SecondStage]:
    made = SecondStage()
    set_links(made)
    yield made
    set_links(None)


def _batch(tokens: list[int], start: int, block: int, beside: int = 0) -> StepInput:
    return ragged([tokens], [start], [stack_tables([[block]])])._replace(num_independent=beside)


def _first_stage(folder: Path, checkpoint: Path) -> Executor:
    plan = WeightPlan.from_json((folder / "weights.json").read_text())
    source = open_source(checkpoint).checkpoint
    assert source is not None
    return Executor(Artifact.open(folder), load_weights(plan, source), 16, stage=Stage(0, 2))


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_two_steps_at_once(kind: str, request: pytest.FixtureRequest, checkpoint: Path, second: SecondStage) -> None:
    executor = _first_stage(request.getfixturevalue(f"{kind}_artifact"), checkpoint)
    assert executor.pipeline_depth == 2
    prompts = [[11, 12, 13, 14], [21, 22, 23]]

    second.give(5)  # one alone, for what it sends
    alone = []
    for number, prompt in enumerate(prompts):
        before = len(second.sent)
        handle = executor.start(_batch(prompt, 0, 1 + number))
        if number:
            second.give(5)
        assert handle.wait().tokens.tolist() == [5]
        alone.append(second.sent[before:])
    assert len(alone[0]) == len(alone[1]) > 0
    second.sent.clear()

    first = executor.start(_batch(prompts[0], 0, 3))
    other = executor.start(_batch(prompts[1], 0, 4, beside=1))
    second.wait(2 * len(alone[0]))  # the layers of both steps are done, though nobody has the logits of any
    for found, expected in zip(second.sent, [*alone[0], *alone[1]], strict=True):
        torch.testing.assert_close(found, expected)
    second.give(7)
    assert first.wait().tokens.tolist() == [7]
    third = executor.start(_batch([7], len(prompts[0]), 3, beside=1))  # of the first sequence again
    second.wait(3 * len(alone[0]))
    fourth = executor.start(_batch([8], len(prompts[1]), 4, beside=0))  # needs all that is before it
    until(lambda: second.asked == 4)
    assert not fourth.jobs[0].wait(0)
    second.give(8)
    assert other.wait().tokens.tolist() == [8]
    second.give(9)
    assert third.wait().tokens.tolist() == [9]
    second.give(3)
    result = fourth.wait()
    assert result.tokens.tolist() == [3]
    assert result.logits is not None
    assert result.logits.argmax(-1).tolist() == [3]
    executor.close()


def test_a_program_that_is_new_runs_alone(
    compiled_artifact: Path, checkpoint: Path, second: SecondStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where loading and capturing wait for the device: what was started before is done and taken, and what
    is behind the layers is launched with them. Others overlap."""
    executor = _first_stage(compiled_artifact, checkpoint)
    new = [False, True, False]
    monkeypatch.setattr(GraphPrograms, "has_run", lambda *asked: not new[0])
    first = executor.start(_batch([11, 12], 0, 3))
    assert executor.stream.is_held(first)
    new.pop(0)
    second.give(5)
    second.give(6)
    other = executor.start(_batch([21, 22, 23], 0, 4, beside=1))
    assert not any(map(executor.stream.is_held, (first, other)))
    assert second.settled == 1
    assert first.jobs[-1].wait(0)
    assert other.jobs[-1].wait(PATIENCE)
    new.pop(0)
    third = executor.start(_batch([5], 2, 3, beside=1))
    assert executor.stream.is_held(third)
    assert second.settled == 1
    second.give(7)
    assert [h.wait().tokens.tolist() for h in (first, other, third)] == [[5], [6], [7]]
    executor.close()


@pytest.mark.parametrize("number", [0, 1])
def test_memory_of_messages(number: int, compiled_artifact: Path, second: SecondStage, checkpoint: Path) -> None:
    """What the largest step sends and gets, against what the artifact says that it does."""
    artifact = Artifact.open(compiled_artifact)
    said = message_bytes(artifact, Stage(number, 2)).memory
    executor = _first_stage(compiled_artifact, checkpoint)
    tokens, rows = artifact.config.max_num_batched_tokens, executor.max_rows
    second.give(5)
    step = _batch([1] * tokens, 0, 1)
    indices = {"logits_indices": np.arange(rows, dtype=np.int32)}
    executor.start(step._replace(rows=rows, arrays={**step.arrays, **indices})).wait()
    hidden = sum(value.nbytes for value in second.sent)
    logits = second.received
    executor.close()
    expected = 3 * hidden + logits if number == 0 else 3 * logits + hidden
    assert expected <= said <= 1.05 * expected


@pytest.mark.parametrize("stages", [2, thorough(4)])
def test_links_between_processes(stages: int, tmp_path: Path) -> None:
    """What a stage sends arrives as it was then, in order, whatever waits on other links; a sender is not held up by a
    receiver that is two messages behind."""
    words = [sys.executable, str(Path(__file__).with_name("links_worker.py")), str(tmp_path / "meeting"), str(stages)]
    processes = [subprocess.Popen([*words, str(stage)]) for stage in range(stages)]
    try:
        assert [process.wait(PATIENCE) for process in processes] == [0] * stages
    finally:
        for process in processes:
            process.kill()
