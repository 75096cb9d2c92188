"""Where the recurrent states of a step's sequences are, and how a reference walks through them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    """The states of a step's sequences.

    A state is [N, versions, ...]. A sequence of n tokens reads its entry at its version. After its tokens it writes
    version n - 1, or the last one where n is larger. Where n is at most versions, it writes the state after each token
    at the token's version, so that rejected drafts are undone by reading an earlier one.

    query_start_loc: sequence s has rows query_start_loc[s]:query_start_loc[s + 1], [S + 1] int32.
    slots: the entry of each sequence, [S] int32. Padding has the last entry, in which anything may be written.
    state_versions: the version of each sequence that is valid, [S] int32.
    """

    query_start_loc: Tensor
    slots: Tensor
    state_versions: Tensor

    @staticmethod
    def of(inputs: SimpleNamespace) -> Slots:
        """Of a graph's inputs, see `ForwardContext`."""
        return Slots(inputs.query_start_loc, inputs.slots, inputs.state_versions)


def sequences(slots: Slots) -> Iterator[tuple[slice, int, int]]:
    """For references, of each sequence that has tokens: its rows, its entry, and the version that it reads."""
    starts = slots.query_start_loc.tolist()
    entries, versions = slots.slots.tolist(), slots.state_versions.tolist()
    for first, end, entry, version in zip(starts, starts[1:], entries, versions, strict=False):
        if end > first:
            yield slice(first, end), entry, version


def version_after(token: int, count: int, versions: int) -> int | None:
    """The version in which the state after a token is kept; None where it is not.

    token: its place among the step's tokens of its sequence.
    count: how many these are.
    """
    return min(token, versions - 1) if count <= versions or token == count - 1 else None
