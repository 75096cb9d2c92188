"""What the process of rank 0 has the other ranks do, and what these answer, as plain data: each step, and each command
(`graphllm.runtime.commands.command`). A rank does the same as if the engine core had called its executor itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from graphllm.runtime.commands.command import Answered, Sent

if TYPE_CHECKING:
    from graphllm.runtime.memory.staging import StepInput


class Array(msgspec.Struct, array_like=True):
    """A numpy array on its way."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: np.ndarray) -> Array:
        return Array(array.dtype.str, array.shape, array.tobytes())

    def numpy(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


def packed(arrays: Mapping[str, np.ndarray]) -> dict[str, Array]:
    """Arrays by name, ready to be sent."""
    return {name: Array.of(array) for name, array in arrays.items()}


def unpacked(arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """What `packed` was given, for reading only."""
    return {name: array.numpy() for name, array in arrays.items()}


class Allocate(msgspec.Struct, tag=True, array_like=True):
    """How many blocks and snapshots each rank has: as many as fit on all of them."""

    blocks: int
    snapshots: int


class Start(msgspec.Struct, tag=True, array_like=True):
    """`Executor.start`."""

    tokens: int
    sequences: int
    rows: int
    query_len: int
    arrays: dict[str, Array]
    num_drafts: int | None
    num_independent: int
    program: str
    drafts: bool

    @staticmethod
    def of(step: StepInput, program: str, drafts: bool) -> Start:
        return Start(
            step.tokens, step.sequences, step.rows, step.query_len, packed(step.arrays), step.num_drafts,
            step.num_independent,            program, drafts,
        )  # fmt: skip

    def step(self) -> StepInput:
        from graphllm.runtime.memory.staging import StepInput  # imports torch

        arrays = unpacked(self.arrays)
        return StepInput(
            self.tokens,
            self.sequences,
            self.rows,
            self.query_len,
            arrays,
            self.num_drafts,
            num_independent=self.num_independent,
        )


class Follow(msgspec.Struct, tag=True, array_like=True):
    """`StagedStream.release`."""

    keep: int


class Sample(msgspec.Struct, tag=True, array_like=True):
    """`Executor.sample` for the step last started. edited: rank 0 edits the logits, and sends them to the others."""

    mask: Array | None
    scores: bool
    edited: bool


class Stop(msgspec.Struct, tag=True, array_like=True):
    """Finish what was started, leave the group and end."""


Message = Allocate | Start | Follow | Sample | Sent | Stop


class Loaded(msgspec.Struct, tag=True):
    """The weights are there. seconds: of each phase of the start so far."""

    seconds: dict[str, float]


class Counted(msgspec.Struct, tag=True):
    """What this rank's memory has room for."""

    blocks: int
    snapshots: int


class Serving(msgspec.Struct, tag=True):
    """The executor is there; from now on commands are obeyed. block_bytes, snapshot_bytes: of this rank's share."""

    seconds: dict[str, float]
    block_bytes: int
    snapshot_bytes: int


class Failed(msgspec.Struct, tag=True):
    """The rank ends. config: the settings are at fault."""

    error: str
    config: bool


Report = Loaded | Counted | Serving | Answered | Failed
