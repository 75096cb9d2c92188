"""Steps for the cases of recurrent ops: how many tokens each sequence has, and which versions there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphllm.config import Bucket
from graphllm.ir.testing import Maker


class Step(NamedTuple):
    """A step of a case.

    counts: tokens of each sequence; 0 for padding.
    versions: entries of a state that a sequence has.
    pad: rows after the last sequence.
    """

    counts: Sequence[int]
    versions: int = 1
    pad: int = 0

    @property
    def rows(self) -> int:
        """Of the step's tensors."""
        return sum(self.counts) + self.pad

    @property
    def entries(self) -> int:
        """Of a state, with two that nobody has and the scrap one."""
        return len(self.counts) + 3

    @property
    def bucket(self) -> Bucket:
        """A range of token counts in which the step lies."""
        decode = all(count <= 1 for count in self.counts)
        return (
            Bucket("decode", self.rows, self.rows) if decode else Bucket("mixed", max(self.rows, 2), max(self.rows, 2))
        )

    @property
    def name(self) -> str:
        few = len(self.counts) <= 4
        lengths = "_".join(map(str, self.counts)) if few else f"{len(self.counts)}x{max(self.counts)}"
        return f"n{lengths}_v{self.versions}" + (f"_pad{self.pad}" if self.pad else "")

    def arguments(self, make: Maker) -> dict[str, Tensor]:
        """What `Slots` holds: entries in any order, versions that differ; sequences without tokens have the scrap
        entry."""
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + count)
        order = torch.randperm(self.entries - 1, generator=make.generator, device=make.generator.device).tolist()
        entries = [entry if count else self.entries - 1 for entry, count in zip(order, self.counts, strict=False)]
        versions = [(3 * s + 1) % self.versions for s in range(len(self.counts))]
        made = {"query_start_loc": starts, "slots": entries, "state_versions": versions}
        return {name: make.tensor(values, torch.int32) for name, values in made.items()}


STEPS = (
    Step([1]),
    Step([1, 1, 1], pad=1),
    Step([2]),
    Step([17]),
    Step([63]),
    Step([65], pad=7),
    Step([130]),
    Step([1, 64, 3, 1], pad=2),
    Step([1, 1, 0, 0]),
    Step([3, 3, 3], versions=3),
    Step([1, 2, 5, 3], versions=3, pad=1),
    Step([1, 1, 20], versions=4),
)


def owned_rows(out: Tensor, args: Mapping[str, Any]) -> Tensor:
    """For `Case.specified`: rows of sequences, not padding."""
    return out[: int(args["query_start_loc"][-1])]


def own_entries(name: str, state: Tensor, args: Mapping[str, Any]) -> Tensor:
    """For `Case.written`: all entries but the scrap one."""
    return state[:-1]
