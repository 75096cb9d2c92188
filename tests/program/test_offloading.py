"""Which weights are offloaded, and when a program's calls have them copied: pure functions, on random programs, against
a device that is played step by step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphllm.config import ConfigError
from graphllm.program.linking import PieceCall
from graphllm.program.offloading import (
    ALIGN,
    AWAIT,
    BEGIN,
    BUFFERS,
    OFFLOADED,
    buffer_of,
    copy_turns,
    plan_offload,
    weight_groups,
    with_copies,
)
from graphllm.program.program import BlockPool, DraftReach, GraphProgram, Program, ProgramCall, ProgramGraph


class Groups:
    """As `OffloadedWeights` in the values from outside."""

    def __init__(self, groups: list[list[str]]) -> None:
        self.groups = groups


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[list[str]], list[list[str]]]:
    """What each call reads, and the groups; a group is read by one call, or by two that follow each other."""
    reads: list[list[str]] = [["tokens"]]
    groups: list[list[str]] = []
    for number in range(draw(st.integers(0, 12))):
        names = [f"layers.{number}.{part}" for part in range(draw(st.integers(1, 3)))]
        again = draw(st.booleans())
        for _ in range(draw(st.integers(1, 3))):
            reads.append(["hidden"])
        reads[-1] += names
        if again and len(names) > 1:
            reads[-1].remove(names[-1])
            reads.append(names[-1:])
        if draw(st.booleans()):
            groups.append(names)
    return reads, groups


@given(programs())
def test_every_call_finds_its_weights(given: tuple[list[list[str]], list[list[str]]]) -> None:
    reads, groups = given
    before, behind = copy_turns(reads, groups)
    buffers: dict[int, int] = {}
    begun: list[int] = []
    ended: set[int] = set()
    current = {name: number for number, names in enumerate(groups) for name in names}
    running: list[int] = []  # groups whose copies may still write

    def run(turns: list[tuple[str, int]]) -> None:
        for routine, group in turns:
            if routine == BEGIN:
                buffers[buffer_of(group)] = group
                begun.append(group)
                running.append(group)
            else:
                assert routine == AWAIT
                running.remove(group)
                ended.add(group)

    for number, names in enumerate(reads):
        run(before.get(number, []))
        for name in names:
            if (group := current.get(name)) is not None:
                assert buffers[buffer_of(group)] == group, "another group has overwritten it"
                assert group in ended, "the copy may still run"
                assert all(buffer_of(other) != buffer_of(group) for other in running)
        run(behind.get(number, []))
    assert begun == [*range(len(groups))]
    assert not running, "a copy that nothing waits for"
    # Each copy begins as early as its buffer allows: while the group before it has still to be read.
    for group in range(BUFFERS, len(groups)):
        last = max(n for n, names in enumerate(reads) if set(names) & set(groups[group - BUFFERS]))
        assert (BEGIN, group) in behind[last]


def test_a_call_that_needs_a_buffer_twice_is_refused() -> None:
    groups = [[f"layers.{n}.w"] for n in range(BUFFERS + 1)]
    with pytest.raises(ConfigError, match=r"cpu_offload_gb: call 1 .* reads more weights than the device has room for"):
        copy_turns([["tokens"], [name for names in groups for name in names]], groups)


@given(st.lists(st.integers(1, 4000), min_size=3, max_size=60), st.integers(1, 100_000))
def test_a_plan_has_what_is_wanted_and_little_more(sizes: list[int], wanted: int) -> None:
    groups = [(f"layers.{n}.w",) for n in range(len(sizes))]
    each = {f"layers.{n}.w": size for n, size in enumerate(sizes)}
    padded = [-(-size // ALIGN) * ALIGN for size in sizes]
    room = BUFFERS * max(padded)
    try:
        plan = plan_offload(groups, each, wanted)
    except ConfigError as refused:
        assert wanted <= room or sum(padded) <= room
        assert ("give more than" in str(refused)) == (sum(padded) > room)  # noqa: PT017
        return
    assert plan.total > BUFFERS * plan.buffer
    assert plan.total >= min(wanted, sum(padded))
    assert [*plan.groups] == sorted(plan.groups, key=groups.index)
    assert plan.buffer >= max(each[name] for names in plan.groups for name in names)
    at = [groups.index(names) for names in plan.groups]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert max(gaps) - min(gaps) <= 1  # evenly
    assert at[-1] == len(groups) - 1  # what comes before the first copy is needed hides it


def test_groups_are_of_one_call_each() -> None:
    def program(*calls: list[str], parts: dict[str, int] | None = None) -> GraphProgram:
        made = tuple(ProgramCall(f"piece{n}", tuple(names), ()) for n, names in enumerate(calls))
        return GraphProgram(made, parts or {}, (), {}, {})

    def graph(name: str, programs: dict[str, GraphProgram]) -> ProgramGraph:
        return ProgramGraph(name, "generate", {}, (), (), programs)

    plain = [["embed.tokens", "layers.0.norm"], ["layers.0.mlp", "layers.0.scale", "layers.1.norm", "layers.9.shared"],
             ["layers.1.mlp", "layers.9.shared", "layers.8.drafted"], ["layers.1.late"]]  # fmt: skip
    main = graph("main", {"plain": program(*plain, parts={"sample": 3}), "other": program(*plain, parts={"sample": 3})})
    draft = graph("draft", {"plain": program(["layers.8.drafted"])})
    found = Program((main, draft), {}, BlockPool((), 0, 0), {}, True, ("T", 1), DraftReach(), [], None, 10)
    names = [name for call in plain for name in dict.fromkeys(call)]
    assert weight_groups(found, dict.fromkeys(names)) == [
        ("layers.0.norm",), ("layers.0.mlp", "layers.0.scale", "layers.1.norm"), ("layers.1.mlp",)
    ]  # fmt: skip


@pytest.mark.parametrize("apart", [False, True])
def test_instructions_are_in_the_calls(apart: bool) -> None:
    """Their names resolve as those of weights do, and no call gets another number, by which storages are named."""
    groups = [[f"layers.{n}.w"] for n in range(3)]
    kernel: list[Any] = ["ir", ["x"], ["y"]] if apart else ["kernel", "k", [["t", "x"], ["t", "w"], ["t", "y"]]]
    bundle = {"inputs": ["x", "w"], "outputs": ["y"], "code": [["empty", "y", [1], [1], "float32"], kernel]}
    calls = [PieceCall(bundle, [f"v{n}", f"layers.{n}.w"], [f"v{n + 1}"]) for n in range(3)]
    made = with_copies(calls, {OFFLOADED: Groups(groups)})
    kind = "message" if apart else "extern"

    def turn(routine: str, group: int) -> list[Any]:
        return [kind, routine, [["t", OFFLOADED], group]]

    assert [call.bundle["code"] for call in made] == [
        [turn(BEGIN, 0), turn(BEGIN, 1), turn(AWAIT, 0), *bundle["code"], turn(BEGIN, 2)],
        [turn(AWAIT, 1), *bundle["code"]],
        [turn(AWAIT, 2), *bundle["code"]],
    ]
    assert [(call.bundle["inputs"], call.inputs) for call in made] == [
        (["x", "w", OFFLOADED], [f"v{n}", f"layers.{n}.w", OFFLOADED]) for n in range(3)
    ]
    assert with_copies(calls, {}) == calls
    assert with_copies(calls, {OFFLOADED: Groups([["layers.7.w"]])}) == calls
