"""Where states lie: groups over one pool of equal blocks, whatever the layers keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphllm.config import ConfigError
from graphllm.program.schema import CacheGroup, CacheLayout
from graphllm.program.specs import StateSpec
from graphllm.program.states import ITEMSIZE, layer_places, own_place, plan_blocks, side_by_side, slot_shape


def _kv(window: int = 0, K: int = 2, dtype: str = "float32") -> StateSpec:
    return StateSpec("kv", "block", (2, K, "P", 8), dtype, "window" if window else "full", window)


def test_layers_with_one_window_share_blocks() -> None:
    """Groups of equal size, so that blocks of every group fit into the same tensors."""

    def planned(*windows: int):
        return plan_blocks([(_kv(w),) for w in windows], 16, 100)

    plan = planned(4, 4, 4, 4, 4, 0)
    assert [g.window for g in plan.groups] == [0, 4, 4, 4, 4, 4]
    assert plan.tensors == 1
    plan = planned(4, 0, 4, 0)
    assert ([g.window for g in plan.groups], plan.tensors) == ([0, 4], 2)
    assert plan.places == ((1, 0), (0, 0), (1, 1), (0, 1))
    plan = planned(4, 4, 4, 0, 0)
    assert ([g.window for g in plan.groups], plan.tensors) == ([0, 4, 4], 2)
    assert len(set(plan.places)) == 5
    # A window that is never reached is none.
    plan = planned(100, 0, 100, 0)
    assert plan.groups == (CacheGroup("full", 0, 16),)
    assert plan.places == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_lighter_states_have_larger_blocks() -> None:
    """As many bytes hold more of their tokens: the largest power of two, and the rest is told."""
    latent = (StateSpec("latent", "block", ("P", 20), "int8"), StateSpec("scale", "block", ("P",), "float32"))
    plan = plan_blocks([(_kv(),), latent, (_kv(64),)], 16, 4096)
    assert plan.block_bytes == 16 * 2 * 2 * 8 * 4
    assert plan.groups == (CacheGroup("full", 0, 16), CacheGroup("full", 0, 64), CacheGroup("window", 64, 16))
    assert plan.unused == (0, plan.block_bytes - 64 * 24, 0)
    places = layer_places(latent, plan, 1, 1)
    assert (places["scale"].shape, places["scale"].offset) == ((64,), 0)
    assert (places["latent"].shape, places["latent"].offset) == ((64, 20), 4 * 64)
    assert places["scale"].stride[0] * 4 == places["latent"].stride[0] == plan.block_bytes


def test_beginnings_are_told_apart_by_the_smallest_blocks() -> None:
    """A model that has recurrent states alone has none: as many tokens as a block has by default."""
    groups = (CacheGroup("full", 0, 64), CacheGroup("window", 64, 8))
    assert CacheLayout(groups, 9).block_size == 8
    assert CacheLayout((), 1, recurrent=True, num_snapshots=2).block_size == 16


def test_mistakes_of_a_model() -> None:
    with pytest.raises(ConfigError, match="block states of one layer must have one retention"):
        plan_blocks([(_kv(), _kv(8))], 16, 100)
    with pytest.raises(ConfigError, match="block states need the dimension 'P' once"):
        plan_blocks([(StateSpec("kv", "block", (2, 8), "float32"),)], 16, 100)


def test_without_block_states() -> None:
    plan = plan_blocks([(StateSpec("s", "slot", (4,), "float32", "last"),), ()], 16, 100)
    assert (plan.groups, plan.places, plan.bytes_per_block) == ((), (None, None), 0)


def test_recurrent_states_have_versions() -> None:
    assert slot_shape(StateSpec("s", "slot", (4, 2), "float32", "last"), 3) == (3, 4, 2)
    assert slot_shape(StateSpec("s", "slot", (4, 2), "float32", "none"), 3) == (4, 2)


SLOTS = st.builds(
    lambda shape, dtype: StateSpec("s", "slot", tuple(shape), dtype, "last"),
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(["float64", "float32", "bfloat16", "int8"]),
)  # fmt: skip


@given(st.lists(SLOTS, max_size=5), st.integers(1, 4))
def test_recurrent_states_of_a_slot_lie_side_by_side(states: list[StateSpec], versions: int) -> None:
    """Each version of a slot is one stretch of memory, in which states do not overlap; what is not recurrent stays."""
    other = {"none": own_place(StateSpec("none", "slot", (3,), "int32", "none"), versions)}
    places, size = side_by_side({f"{i}": own_place(s, versions) for i, s in enumerate(states)} | other)
    assert places.pop("none") == other["none"]
    memory = np.zeros((4, versions, size), np.uint8)
    for place in places.values():
        item = ITEMSIZE[place.dtype]
        assert place.offset * item % 16 == 0
        strides = [s * item for s in place.stride]
        view = np.lib.stride_tricks.as_strided(
            memory.reshape(-1)[place.offset * item :], (4, *place.shape, item), (*strides, 1)
        )
        assert (view == 0).all()  # of no other state
        view[2, versions - 1] = 1
    written = memory.any(-1)
    assert written[2, versions - 1] == bool(states)
    assert written.sum() == bool(states)


STATES = st.builds(
    lambda name, width, dtype: StateSpec(name, "block", ("P", width), dtype),
    st.sampled_from("abc"), st.integers(1, 40), st.sampled_from(["float32", "bfloat16", "int8"]),
)  # fmt: skip


@given(
    st.lists(st.lists(STATES, max_size=3, unique_by=lambda s: s.name), min_size=1, max_size=6),
    st.sampled_from([1, 2, 8, 16]),
)
def test_states_of_a_layer_do_not_overlap(layers: list[list[StateSpec]], block_size: int) -> None:
    plan = plan_blocks(layers, block_size, 1 << 12)
    for number, states in enumerate(layers):
        taken: list[tuple[int, int]] = []
        for place in layer_places(states, plan, number, 1).values():
            item = ITEMSIZE[place.dtype]
            assert place.stride[0] * item == plan.block_bytes
            taken.append((place.offset * item, place.offset * item + item * math.prod(place.shape)))
        for (_, end), (start, _) in zip(sorted(taken), sorted(taken)[1:], strict=False):
            assert end <= start
        assert all(end <= plan.block_bytes for _, end in taken)
    sizes = {g.block_size for g in plan.groups}
    assert all(size % min(sizes) == 0 for size in sizes)
