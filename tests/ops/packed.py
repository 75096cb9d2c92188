"""Steps of tests of recurrent ops: sequences one after the other, and where their states are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphllm.ops.recurrent.slots import Slots


def packed(counts: Sequence[int], entries: Sequence[int] | None = None, versions: Sequence[int] | None = None) -> Slots:
    """Sequences of so many tokens. entries: of their states, 0, 1 ... if not given. versions: zeros if not given."""
    starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
    many = len(counts)
    made = (starts, range(many) if entries is None else entries, [0] * many if versions is None else versions)
    return Slots(*(torch.tensor([*values], dtype=torch.int32) for values in made))
