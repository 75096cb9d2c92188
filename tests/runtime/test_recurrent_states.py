"""Recurrent states in memory: views of one buffer, in which a slot is zeroed, saved and loaded whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphllm.config import ConfigError
from graphllm.program.program import BlockPool
from graphllm.program.specs import StateSpec
from graphllm.program.states import own_place, side_by_side
from graphllm.runtime.memory.states import States
from graphllm.runtime.memory.torch_memory import TorchMemory

KINDS = {
    "state.layers.0.conv": StateSpec("conv", "slot", (3, 5), "bfloat16", "last"),
    "state.layers.0.ssm": StateSpec("ssm", "slot", (2, 4, 3), "float32", "last"),
    "state.layers.1.ssm": StateSpec("ssm", "slot", (2, 4, 3), "float32", "last"),
    "state.seen": StateSpec("seen", "slot", (7,), "int32", "none"),
}
SLOTS, VERSIONS = 4, 3


def _program(slot_bytes: int | None = None) -> Any:
    """What `States` reads of one."""
    version = {"state.version": own_place(StateSpec("version", "slot", (), "int32", "none"))}
    places, size = side_by_side({name: own_place(spec, VERSIONS) for name, spec in KINDS.items()} | version)
    return SimpleNamespace(
        states=places,
        blocks=BlockPool((), 0, 0),
        entries={"slot": SLOTS + 1, "recurrent": SLOTS + 1},
        slot_bytes=size if slot_bytes is None else slot_bytes,
        snapshot_bytes=size,
    )


def _filled(snapshots: int = 2) -> States:
    torch.manual_seed(0)
    states = States(_program(), TorchMemory(torch.device("cpu")), 1, snapshots)
    for name in KINDS:
        tensor = states.tensors[name]
        tensor.copy_(torch.randint(1, 100, tensor.shape))
    return states


def _copy(states: States) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in states.tensors.items()}


def _recurrent(name: str) -> bool:
    return name in KINDS and KINDS[name].retention == "last"


def test_a_slot_is_zeroed_and_nothing_else() -> None:
    states = _filled()
    before = _copy(states)
    states.reset_slots([1, 3])
    for name, tensor in states.tensors.items():
        changed = [1, 3] if _recurrent(name) or name == "state.version" else []
        for slot in range(SLOTS + 1):
            wanted = torch.zeros_like(tensor[slot]) if slot in changed else before[name][slot]
            assert torch.equal(tensor[slot], wanted), (name, slot)


def test_a_snapshot_is_of_the_valid_version_and_becomes_the_first_one() -> None:
    states = _filled()
    states.tensors["state.version"].copy_(torch.tensor([0, 2, 1, 0, 0]))
    before = _copy(states)
    states.save_snapshots([(1, 0), (2, 1)])
    assert all(torch.equal(states.tensors[n], before[n]) for n in before)
    states.load_snapshots([(0, 3), (1, 1)])
    for name in filter(_recurrent, KINDS):
        for slot, (source, version) in {3: (1, 2), 1: (2, 1)}.items():
            assert torch.equal(states.tensors[name][slot, 0], before[name][source, version])
            assert not states.tensors[name][slot, 1:].any()
        assert torch.equal(states.tensors[name][[0, 2, 4]], before[name][[0, 2, 4]])
    assert states.tensors["state.version"].tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(states.tensors["state.seen"], before["state.seen"])


def test_bytes_of_snapshots_cross_to_another_memory() -> None:
    first, second = _filled(), States(_program(), TorchMemory(torch.device("cpu")), 1, 3)
    first.save_snapshots([(2, 1)])
    (content,) = first.read_snapshots([1])
    assert len(content) == first.snapshot_bytes == second.snapshot_bytes
    second.write_snapshots([2], [content])
    second.load_snapshots([(2, 0)])
    for name in filter(_recurrent, KINDS):
        assert torch.equal(second.tensors[name][0, 0], first.tensors[name][2, 0])


def test_an_artifact_whose_states_lay_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile again"):
        States(_program(slot_bytes=0), TorchMemory(torch.device("cpu")), 1, 0)
