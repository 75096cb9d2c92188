"""Snapshots in 8 bits: what a slot gets back, whatever kinds of states it has, and in how many bytes they are kept."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm.compile.tasks.snapshots import load, save
from graphllm.program.program import BlockPool
from graphllm.program.snapshots import plan_snapshots
from graphllm.program.specs import StateSpec
from graphllm.program.states import own_place, side_by_side
from graphllm.runtime.memory.states import States
from graphllm.runtime.memory.torch_memory import TorchMemory
from tests.tiers import draws

SLOTS, SNAPSHOTS = 4, 3
KINDS = st.builds(
    lambda shape, dtype, over: StateSpec("s", "slot", tuple(shape), dtype, "last", int8_over=over),
    st.lists(st.integers(1, 6), min_size=2, max_size=3), st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([0, -1, -2]),
)  # fmt: skip


def _states(kinds: list[StateSpec], versions: int) -> States:
    places, size = side_by_side({f"state.layers.{i}.s": own_place(s, versions) for i, s in enumerate(kinds)})
    views, snapshot_bytes = plan_snapshots(places, size)
    version = own_place(StateSpec("version", "slot", (), "int32", "none"))
    program = SimpleNamespace(
        states=places | views | {"state.version": version}, blocks=BlockPool((), 0, 0),
        entries={"slot": SLOTS, "recurrent": SLOTS}, slot_bytes=size, snapshot_bytes=snapshot_bytes,
    )  # fmt: skip
    return States(program, TorchMemory(torch.device("cpu")), 1, SNAPSHOTS)  # type: ignore[arg-type]


@settings(max_examples=draws(60, 400))
@given(
    st.lists(KINDS, min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1 << 30),
    st.floats(-30, 30),
)  # fmt: skip
def test_a_slot_gets_its_states_back(
    kinds: list[StateSpec], layers: int, versions: int, seed: int, size: float
) -> None:
    """Each number of a state that may have 8 bits within half a step of its scale, all others exactly; nothing else is
    written."""
    kinds = [StateSpec("s", "slot", (2, 3), "float32", "last", int8_over=-2), *kinds] * layers
    torch.manual_seed(seed)
    states = _states(kinds, versions)
    tensors = {i: states.tensors[f"state.layers.{i}.s"] for i in range(len(kinds))}
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape) * 10.0 ** (size * torch.rand(())))
    states.tensors["state.version"].copy_(torch.tensor([0, versions - 1, 0, 0]))
    before = {i: tensor.clone() for i, tensor in tensors.items()}

    def step(slot: int, snapshot: int) -> dict[str, torch.Tensor]:
        pair = {"slots": [slot, SLOTS - 1], "snapshots": [snapshot, -1]}
        return states.tensors | {f"step.{n}": torch.tensor(v, dtype=torch.int32) for n, v in pair.items()}

    save(step(1, 2))
    assert all(torch.equal(tensor, before[i]) for i, tensor in tensors.items())
    states.reset_slots([1])
    load(step(0, 2))
    for i, tensor in tensors.items():
        assert torch.equal(tensor[2:], before[i][2:])
        assert torch.equal(tensor[0, 1:], before[i][0, 1:])
        assert not tensor[1].any()
        found, wanted = tensor[0, 0].double(), before[i][1, versions - 1].double()
        if not kinds[i].int8_over:
            assert torch.equal(found, wanted)
            continue
        most = wanted.abs().amax(kinds[i].int8_over, keepdim=True)
        rounding = 2.0**-8 if tensor.dtype == torch.bfloat16 else 1e-6
        least = 1e-35  # in which a scale is 0
        assert ((found - wanted).abs() <= most * (0.5 / 127 + rounding) + least).all()


def test_a_snapshot_takes_a_quarter_of_float32_states() -> None:
    """And all of the other states; of Qwen3-Next's shape."""
    delta = StateSpec("delta", "slot", (32, 128, 128), "float32", "last", int8_over=-2)
    conv = StateSpec("conv", "slot", (3, 8192), "bfloat16", "last")
    places = {f"{i}.{s.name}": own_place(s) for i in range(36) for s in (delta, conv)}
    views, size = plan_snapshots(*side_by_side(places))
    numbers = 36 * 32 * 128 * 128
    assert size == numbers + 4 * numbers // 128 + 36 * 3 * 8192 * 2
    assert len(views) == 5  # one kind, so one launch


def test_without_states_that_may_have_8_bits_there_is_nothing() -> None:
    places = {"conv": own_place(StateSpec("conv", "slot", (3, 64), "bfloat16", "last"))}
    assert plan_snapshots(*side_by_side(places)) == ({}, 0)


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    """They come back as NaN, with all that share their scale; zeros stay zeros."""
    states = _states([StateSpec("s", "slot", (2, 3, 4), "float32", "last", int8_over=-2)], 1)
    tensor = states.tensors["state.layers.0.s"]
    tensor[0, 0, 0, 1, 2], tensor[0, 0, 1, 0, 3] = float("nan"), float("inf")
    given = {"step.slots": torch.tensor([0]), "step.snapshots": torch.tensor([0])}
    save(states.tensors | given)
    load(states.tensors | given)
    wrong = tensor[0, 0].isnan()
    assert wrong[0, :, 2].all()
    assert wrong[1, :, 3].all()
    assert wrong.sum() == 6
    assert not tensor[0, 0].nan_to_num().any()
