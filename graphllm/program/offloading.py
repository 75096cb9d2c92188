"""Weights that lie in the host's memory: which ones, and when a program's calls have them copied to the device. No
torch.

A group is all offloaded parameters that one call reads. Groups take turns in a few buffers of the device. While the
calls of one group run, the next group is copied into another buffer. Nothing of this is compiled: copies and waits are
instructions in front of the code of a call, and behind it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.program.linking import PieceCall
from graphllm.program.program import Program

OFFLOADED = "offloaded weights"  # the outside value that copies them
BUFFERS = 2  # groups that the device has room for
ALIGN = 512  # bytes, as torch aligns what it allocates on a GPU
_OF_LAYER = re.compile(r"layers\.\d+\.")
_NOT_CAPTURED = ("ir", "message")  # instructions that no CUDA graph may hold


class OffloadPlan(NamedTuple):
    """Which parameters lie in the host's memory.

    groups: names, in the order in which a step reads them.
    sizes: bytes of each group.
    """

    groups: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of the host's memory."""
        return sum(self.sizes)

    @property
    def buffer(self) -> int:
        """Bytes of one buffer of the device."""
        return max(self.sizes, default=0)


def buffer_of(group: int) -> int:
    """The number of the buffer that a group is copied to."""
    return group % BUFFERS


def weight_groups(program: Program, names: Collection[str]) -> list[tuple[str, ...]]:
    """The groups that may be offloaded, in the order of their calls: parameters of layers that each program of the
    first graph reads in one call, within its first part, and that no other graph reads. names: parameters with memory
    of their own."""
    candidates = {name for name in names if _OF_LAYER.match(name)}
    for graph in program.graphs[1:]:
        candidates -= {name for order in graph.programs.values() for call in order.calls for name in call.inputs}
    places: dict[str, list[int]] = {name: [] for name in candidates}  # the call of each program
    for count, order in enumerate(program.graphs[0].programs.values(), 1):
        end = min(order.parts.values(), default=len(order.calls))
        for number, call in enumerate(order.calls):
            for name in candidates.intersection(call.inputs):
                places[name].append(number if number < end else -1)
        candidates = {name for name in candidates if len(places[name]) == count and places[name][-1] >= 0}
    found: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        if name in candidates:
            found.setdefault(tuple(places[name]), []).append(name)
    return [tuple(found[key]) for key in sorted(found)]


def plan_offload(groups: Sequence[tuple[str, ...]], sizes: Mapping[str, int], wanted: int) -> OffloadPlan:
    """Groups of at least ``wanted`` bytes together, spread evenly among all: steps compute while they copy. All of them
    where they are less. sizes: bytes of each parameter.

    Raises ConfigError where the buffers take as much as the device saves.
    """
    every = [sum(aligned(sizes[name]) for name in names) for names in groups]
    for count in range(1, len(groups) + 1):
        taken = [(number + 1) * len(groups) // count - 1 for number in range(count)]
        plan = OffloadPlan(tuple(groups[n] for n in taken), tuple(every[n] for n in taken))
        if plan.total >= wanted:
            break
    else:
        plan = OffloadPlan(tuple(groups), tuple(every))
    if plan.total <= BUFFERS * plan.buffer:
        largest = max(every, default=0)
        needed = f"{BUFFERS * largest / 2**30:.2g}"
        more = f"give more than {needed}, or " if sum(every) > BUFFERS * largest else ""
        raise ConfigError(
            f"cpu_offload_gb is {wanted / 2**30:g}: the device saves nothing, because it needs room for {BUFFERS} of "
            f"this model's {len(groups)} groups of weights at once, {needed} GiB; {more}leave it out"
        )
    return plan


def aligned(nbytes: int) -> int:
    """Bytes from one parameter of a group to the next one."""
    return -(-nbytes // ALIGN) * ALIGN


def with_copies(calls: list[PieceCall], outside: Mapping[str, Any]) -> list[PieceCall]:
    """The calls of a program with the instructions that copy weights. outside: its value `OFFLOADED` has the groups;
    without one the calls are as they are."""
    if OFFLOADED not in outside:
        return calls
    groups: Sequence[Sequence[str]] = outside[OFFLOADED].groups
    before, behind = copy_turns([call.inputs for call in calls], groups)
    if not before:
        return calls
    # A copy that begins in a CUDA graph ends there. Where other instructions part the graphs, copies are between them.
    whole = all(code[0] not in _NOT_CAPTURED for call in calls for code in call.bundle["code"])
    kind = "extern" if whole else "message"

    def instructions(turns: Sequence[tuple[str, int]]) -> Iterator[list[Any]]:
        for routine, group in turns:
            yield [kind, routine, [["t", OFFLOADED], group]]

    made = []
    for number, call in enumerate(calls):
        ahead, after = before.get(number, ()), behind.get(number, ())
        if ahead or after:
            code = [*instructions(ahead), *call.bundle["code"], *instructions(after)]
            bundle = {**call.bundle, "inputs": [*call.bundle["inputs"], OFFLOADED], "code": code}
            call = PieceCall(bundle, [*call.inputs, OFFLOADED], call.outputs)
        made.append(call)
    return made


BEGIN, AWAIT = "begin_weights_copy", "await_weights_copy"  # routines
Turns = dict[int, list[tuple[str, int]]]


def copy_turns(reads: Sequence[Collection[str]], groups: Sequence[Sequence[str]]) -> tuple[Turns, Turns]:
    """What is to be done in front of calls, and behind them: (routine, group), by the number of the call.

    A copy begins as soon as the last call has ended that reads what its buffer held before. reads: of each call.
    Raises ConfigError where a call needs a buffer for two groups.
    """
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, names in enumerate(reads):
        for group in sorted({group_of[name] for name in names if name in group_of}):
            first.setdefault(group, number)
            last[group] = number
    before: Turns = {}
    behind: Turns = {}
    held: dict[int, int] = {}  # the group in each buffer
    for group in first:
        previous = held.get(buffer_of(group))
        if previous is None:
            before.setdefault(0, []).append((BEGIN, group))
        elif last[previous] >= first[group]:
            raise ConfigError(
                f"cpu_offload_gb: call {first[group]} of a program of this model reads more weights than the device "
                "has room for at once; leave it out"
            )
        else:
            behind.setdefault(last[previous], []).append((BEGIN, group))
        held[buffer_of(group)] = group
    for group, number in first.items():
        before.setdefault(number, []).append((AWAIT, group))
    return before, behind
