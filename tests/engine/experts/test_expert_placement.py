"""Where experts are put: whatever the load, every expert has a slot, ranks have as many, and none gets busier."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm.engine.experts.expert_placement import balanced, balancedness, moves_between, rank_loads
from graphllm.weights.plan.expert_slots import first_placement, routing_tables
from tests.tiers import draws


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Tokens of experts, some placement of them, and the ranks."""
    ranks = draw(st.integers(1, 6))
    room = draw(st.integers(1, 8))
    experts = draw(st.integers(1, ranks * room))
    tokens = draw(st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts))
    more = draw(st.lists(st.integers(0, experts - 1), min_size=ranks * room - experts, max_size=ranks * room - experts))
    return tokens, draw(st.permutations([*range(experts), *more])), ranks


def most(tokens: list[int], placement: list[int], ranks: int) -> float:
    """Tokens of the busiest rank, counted token by token where they are few."""
    room = len(placement) // ranks
    share = {e: tokens[e] / n for e, n in Counter(placement).items()}
    return max(sum(share[e] for e in placement[at : at + room]) for at in range(0, len(placement), room))


@settings(deadline=None, max_examples=draws(100, 300))
@given(layers())
def test_every_expert_has_a_slot_and_no_rank_gets_busier(layer: tuple[list[int], list[int], int]) -> None:
    tokens, placement, ranks = layer
    found = balanced(tokens, placement, ranks)
    assert len(found) == len(placement)
    assert {*found} == {*range(len(tokens))}
    assert most(tokens, found, ranks) <= most(tokens, placement, ranks)
    assert balanced(tokens, found, ranks) == found or most(tokens, balanced(tokens, found, ranks), ranks) < most(
        tokens, found, ranks
    )
    assert max(rank_loads(tokens, found, ranks)) == pytest.approx(most(tokens, found, ranks))


@settings(deadline=None, max_examples=draws(100, 300))
@given(layers(), st.randoms(use_true_random=False))
def test_moves_lead_from_one_placement_to_another(layer: tuple[list[int], list[int], int], random: object) -> None:
    """Carried out on what the slots hold, a group at once: no expert is lost on the way, and the end is right."""
    tokens, old, ranks = layer
    spare = len(old) - len(tokens)
    new = [*range(len(tokens)), *(random.randrange(len(tokens)) for _ in range(spare))]  # type: ignore[attr-defined]
    random.shuffle(new)  # type: ignore[attr-defined]
    groups, slots = moves_between(old, new, ranks), list(old)
    assert len(groups) <= sum(a != b for a, b in zip(old, new, strict=True))
    for group in groups:
        assert 1 <= len(group) <= 2
        held = [slots[source] for source, _ in group]
        for expert, (_, target) in zip(held, group, strict=True):
            slots[target] = expert
        assert {*slots} == {*range(len(tokens))}
    assert slots == new


@given(layers())
def test_tables_have_each_slot_under_its_expert(layer: tuple[list[int], list[int], int]) -> None:
    tokens, placement, _ = layer
    starts, slots = routing_tables(placement, len(tokens))
    assert sorted(slots) == list(range(len(placement)))
    for expert, (begin, end) in enumerate(itertools.pairwise(starts)):
        assert begin < end
        assert {placement[slot] for slot in slots[begin:end]} == {expert}


def test_a_hot_expert_gets_the_copies() -> None:
    """Eight experts on four ranks, of which one has as many tokens as all others together."""
    tokens, placement = [70, 10, 10, 10, 10, 10, 10, 10], list(first_placement(8, 4))
    found = balanced(tokens, placement, 4)
    assert Counter(found) == {0: 5, **dict.fromkeys(range(1, 8), 1)}
    assert balancedness(rank_loads(tokens, placement, 4)) == pytest.approx(35 / 55)  # of 45, 25, 55, 15
    assert balancedness(rank_loads(tokens, found, 4)) > 0.9


def test_without_copies_experts_are_only_dealt_out() -> None:
    tokens, placement = [8, 7, 6, 5, 4, 3, 2, 1], list(range(8))
    found = balanced(tokens, placement, 2)
    assert sorted(found) == placement
    assert rank_loads(tokens, found, 2) == [18, 18]


def test_little_gain_moves_nothing() -> None:
    assert balanced([10, 10, 10, 11], [0, 1, 2, 3], 2, gain=0.5) == [0, 1, 2, 3]
    assert balanced([0, 0, 0, 0], [3, 1, 2, 0], 2) == [3, 1, 2, 0]
    assert balancedness([0, 0]) == 1
