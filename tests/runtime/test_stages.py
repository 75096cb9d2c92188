"""The first stage of a pipeline, in one process, with a group that says when: the next step's layers run while the
logits of the step before are still to come, and nothing of the two gets mixed up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphllm import artifact
from graphllm.entrypoints.source import open_source
from graphllm.ir.groups import set_group
from graphllm.program.stages import PIPELINE, Stage
from graphllm.runtime.executor import Executor
from graphllm.runtime.staging import StepInput, ragged, stack_tables
from graphllm.weights.loader import load_weights
from graphllm.weights.plan import WeightPlan

SECONDS = 30.0


class SecondStage:
    """What the first stage sees of the second. It gives the logits of a step, in which a token is the likeliest, when
    that is put into ``tokens``."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.arrived = threading.Condition()
        self.tokens: list[int] = []

    def send(self, x: Tensor, to: int) -> None:
        assert to == 1
        with self.arrived:
            self.sent.append(x.clone())
            self.arrived.notify_all()

    def broadcast(self, x: Tensor, origin: int) -> None:
        assert origin == 1
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.tokens, SECONDS)
            token = self.tokens.pop(0)
        x.zero_()
        x[..., token] = 9.0

    def give(self, token: int) -> None:
        with self.arrived:
            self.tokens.append(token)
            self.arrived.notify_all()

    def wait(self, count: int) -> None:
        """Until so many values have been sent."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.sent) >= count, SECONDS)

    def receive(self, out: Tensor, origin: int) -> None:
        raise AssertionError("the first stage receives nothing")

    all_reduce = all_gather = receive


@pytest.fixture
def second() -> Iterator[SecondStage]:
    made = SecondStage()
    set_group(PIPELINE, made)
    yield made
    set_group(PIPELINE, None)


def _batch(tokens: list[int], start: int, block: int) -> StepInput:
    return ragged([tokens], [start], [stack_tables([[block]])])


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_two_steps_at_once(kind: str, request: pytest.FixtureRequest, checkpoint: Path, second: SecondStage) -> None:
    folder = request.getfixturevalue(f"{kind}_artifact")
    plan = WeightPlan.from_json((folder / "weights.json").read_text())
    source = open_source(checkpoint).checkpoint
    assert source is not None
    weights = load_weights(plan, source)
    executor = Executor(folder, artifact.verify(folder), weights, 16, stage=Stage(0, 2))
    assert executor.overlapping == 2
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
    other = executor.start(_batch(prompts[1], 0, 4))
    second.wait(2 * len(alone[0]))  # the layers of both steps are done, though nobody has the logits of any
    assert not first.jobs[-1].wait(0.05)
    for found, expected in zip(second.sent, [*alone[0], *alone[1]], strict=True):
        torch.testing.assert_close(found, expected)
    second.give(7)
    assert first.wait().tokens.tolist() == [7]
    assert not other.jobs[-1].wait(0.05)
    third = executor.start(_batch([7], len(prompts[0]), 3))  # of the first sequence again, beside the other one
    second.wait(3 * len(alone[0]))
    second.give(8)
    assert other.wait().tokens.tolist() == [8]
    second.give(9)
    result = third.wait()
    assert result.tokens.tolist() == [9]
    assert result.logits is not None
    assert result.logits.argmax(-1).tolist() == [9]
    executor.close()
