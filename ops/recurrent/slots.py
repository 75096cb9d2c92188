"""Where the recurrent states of a step's sequences are, and how a reference walks through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from graphllm.program.schema import BORDER

_F = TypeVar("_F", bound=Callable[..., Any])


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


def sequences(slots: Slots, exports: Tensor | None = None) -> Iterator[tuple[slice, int, int, int]]:
    """For references, of each sequence that has tokens: its rows, its entry, the version that it reads, and the entry
    that its state is exported to, -1 for none."""
    starts = slots.query_start_loc.tolist()
    entries, versions = slots.slots.tolist(), slots.state_versions.tolist()
    to = [-1] * len(entries) if exports is None else exports.tolist()
    for first, end, entry, version, export in zip(starts, starts[1:], entries, versions, to, strict=False):
        if end > first:
            yield slice(first, end), entry, version, export


def version_after(token: int, count: int, versions: int) -> int | None:
    """The version in which the state after a token is kept; None where it is not.

    token: its place among the step's tokens of its sequence.
    count: how many these are.
    """
    return min(token, versions - 1) if count <= versions or token == count - 1 else None


def border_of(count: int) -> int:
    """Where the state of a sequence with so many tokens in a step is exported: after the last multiple of `BORDER`
    tokens that others follow; 0 for none."""
    return max(0, count - 1) // BORDER * BORDER


def exporting(fn: _F) -> _F:
    """Says of an implementation that it writes the states that ``exports`` asks for. One that does not say so ignores
    them, and the scheduler ends a chunk where it wants a snapshot."""
    fn.exporting = True  # type: ignore[attr-defined]
    return fn
