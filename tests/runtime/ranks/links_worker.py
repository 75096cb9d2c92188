"""One stage of a pipeline that only sends messages: `test_stages`, and on GPUs `tests/gpu/test_ranks_cuda.py`, start
one process for each. On a GPU kernels of some milliseconds lie between the messages.

    python links_worker.py MEETING STAGES STAGE [cuda]
"""

from __future__ import annotations

import sys
import time

import torch

from graphllm.ir.groups import links_of
from graphllm.runtime.ranks.groups import Meeting, joined

STEPS = 12


def content(origin: int, step: int, device: torch.device) -> list[torch.Tensor]:
    """What a stage sends in a step: numbers of several dtypes, one of them not in one piece."""
    first = torch.arange(2000 + step, device=device, dtype=torch.float32) + 1000 * origin
    return [first.bfloat16(), (first[:999].view(9, 111) * (step + 1)).t(), torch.full((3,), step, device=device)]


def check(found: list[torch.Tensor], origin: int, step: int) -> None:
    """Assert that it is what was sent."""
    for value, expected in zip(found, content(origin, step, found[0].device), strict=True):
        assert torch.equal(value, expected), (origin, step)


def work(stage: int, stages: int, device: torch.device) -> None:
    """As a pipeline does: layers of each step, and later what comes from the last stage, which is told at once."""
    links, last = links_of(stages), stages - 1
    for step in range(STEPS + last):
        if step < STEPS:
            if stage:
                values = [torch.zeros_like(value) for value in content(stage - 1, step, device)]
                links.receive(values, stage - 1)
                check(values, stage - 1, step)
            for to in [[stage + 1]] if stage < last else [list(range(last))]:
                values = content(stage, step, device)
                links.send(values, to)
                for value in values:
                    value.zero_()  # a sender may use the memory again
        if stage < last and step >= last:
            values = [torch.zeros_like(value) for value in content(last, step - last, device)]
            links.receive(values, last)
            check(values, last, step - last)
        if stage == last:
            time.sleep(0.01)


def main() -> None:
    meeting, stages, stage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    kind = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, stage)
    with joined(stage, stages, Meeting(f"file://{meeting}"), device, stages):
        work(stage, stages, device)
        if kind == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
