"""What the process of rank 0 has the other ranks do, and what these answer, as plain data. An executor's calls, one
message each: what a rank does is the same as if the engine core had called its executor itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from graphllm.program.schema import ExpertMoves

if TYPE_CHECKING:
    import torch

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
    beside: int
    program: str
    drafts: bool

    @staticmethod
    def of(step: StepInput, program: str, drafts: bool) -> Start:
        return Start(
            step.tokens, step.sequences, step.rows, step.query_len, packed(step.arrays), step.num_drafts, step.beside,
            program, drafts,
        )  # fmt: skip

    def step(self) -> StepInput:
        from graphllm.runtime.memory.staging import StepInput  # imports torch

        arrays = unpacked(self.arrays)
        return StepInput(
            self.tokens, self.sequences, self.rows, self.query_len, arrays, self.num_drafts, beside=self.beside
        )


class Follow(msgspec.Struct, tag=True, array_like=True):
    """`Executor.follow`."""

    but: int


class Sample(msgspec.Struct, tag=True, array_like=True):
    """`Executor.sample` for the step last started. edited: rank 0 edits the logits, and sends them to the others."""

    mask: Array | None
    scores: bool
    edited: bool


class Encode(msgspec.Struct, tag=True, array_like=True):
    """`Executor.encode`."""

    data: Array
    length: int
    start: int


class WriteEntry(msgspec.Struct, tag=True, array_like=True):
    """`Executor.write_entry`."""

    entry: int
    values: dict[str, Array]


class AdapterTable(msgspec.Struct, tag=True, array_like=True):
    """One of the tables for the next WriteAdapter. dtype: torch's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(name: str, table: torch.Tensor) -> AdapterTable:
        return AdapterTable(name, str(table.dtype)[6:], tuple(table.shape), _bytes(table))

    def tensor(self) -> torch.Tensor:
        """For reading only."""
        import torch

        return torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype)).view(self.shape)


def _bytes(table: torch.Tensor) -> bytes:
    import torch

    return table.contiguous().view(torch.uint8).numpy().tobytes()


class WriteAdapter(msgspec.Struct, tag=True, array_like=True):
    """`Executor.write_adapter`, with the tables that came before."""

    entry: int


class MoveExperts(msgspec.Struct, tag=True, array_like=True):
    """`Executor.move_experts`."""

    layer: int
    groups: list[list[tuple[int, int]]]
    placement: list[int]

    @staticmethod
    def of(moves: ExpertMoves) -> MoveExperts:
        return MoveExperts(moves.layer, moves.groups, moves.placement)

    def moves(self) -> ExpertMoves:
        return ExpertMoves(self.layer, self.groups, self.placement)


class Move(msgspec.Struct, tag=True, array_like=True):
    """`Executor.copy_blocks`, `save_snapshots` or `load_snapshots`."""

    method: str
    pairs: list[tuple[int, int]]


class ResetSlots(msgspec.Struct, tag=True, array_like=True):
    """`Executor.reset_slots`."""

    slots: list[int]


class Read(msgspec.Struct, tag=True, array_like=True):
    """`Executor.read_blocks` or `read_snapshots`; answered by Contents."""

    method: str
    numbers: list[int]


class Write(msgspec.Struct, tag=True, array_like=True):
    """`Executor.write_blocks` or `write_snapshots`. contents: for each of the ranks 1, 2 ..."""

    method: str
    numbers: list[int]
    contents: list[list[bytes]]


class Call(msgspec.Struct, tag=True, array_like=True):
    """`Executor.call`: a function, module:name, that is given the rank's `Worker` first; answered by Answered."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any]


class Stop(msgspec.Struct, tag=True, array_like=True):
    """Finish what was started, leave the group and end."""


Command = (
    Allocate | Start | Follow | Sample | Encode | WriteEntry | AdapterTable | WriteAdapter | MoveExperts | Move
    | ResetSlots | Read | Write | Call | Stop
)  # fmt: skip


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


class Contents(msgspec.Struct, tag=True):
    """Bytes of blocks or snapshots."""

    data: list[bytes]


class Answered(msgspec.Struct, tag=True):
    """What a function has returned, or why it has not."""

    value: Any = None
    error: str | None = None


class Failed(msgspec.Struct, tag=True):
    """The rank ends. config: it could not be loaded as it was told to."""

    error: str
    config: bool


Report = Loaded | Counted | Serving | Contents | Answered | Failed
