"""Slots and snapshots for the cases of save_snapshots and load_snapshots, in memory as the engine lays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphllm.config import Bucket
from graphllm.ir.testing import Maker


class Memory(NamedTuple):
    """Of a case.

    kind: L, H, R and C.
    pairs: (slot, snapshot).
    words: of other states.
    versions: of a slot's states.
    """

    kind: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    words: int = 5
    versions: int = 1
    slots: int = 6
    snapshots: int = 5

    @property
    def name(self) -> str:
        return "x".join(map(str, self.kind)) + f"_pairs{len(self.pairs)}_words{self.words}_v{self.versions}"

    @property
    def bucket(self) -> Bucket:
        """Of its pairs."""
        return Bucket("decode", len(self.pairs), len(self.pairs))

    def states(self, make: Maker) -> dict[str, Any]:
        """Slots, each with a gap between its states. Columns have unlike magnitudes, and one is zero."""
        L, H, R, C = self.kind
        state = make.normal(self.slots, self.versions, L, H * R * C + 16)[..., : H * R * C]
        state = state.unflatten(-1, (H, R, C))
        state.mul_(torch.logspace(-6, 4, C, device=state.device).to(state.dtype))
        state[:, :, -1, -1, :, -1] = 0
        words = make.integers(-(1 << 30), 1 << 30, self.slots, self.versions, self.words + 4)
        return {"state": state, "rest": words[..., : self.words]}

    def kept(self, make: Maker) -> dict[str, Any]:
        """Snapshots, each part in wider rows."""
        L, H, R, C = self.kind
        codes = make.integers(-127, 128, self.snapshots, L * H * R * C + 32, dtype=torch.int8)
        scales = make.normal(self.snapshots, L * H * C + 4, dtype=torch.float32).abs()
        words = make.integers(-(1 << 30), 1 << 30, self.snapshots, self.words + 4)
        return {
            "codes": codes[:, : L * H * R * C].unflatten(-1, (L, H, R, C)),
            "scales": scales[:, : L * H * C].unflatten(-1, (L, H, C)),
            "kept": words[:, : self.words],
        }

    def places(self, make: Maker) -> dict[str, Any]:
        """The pairs."""
        slots, snapshots = ([pair[i] for pair in self.pairs] for i in (0, 1))
        return {"slots": make.tensor(slots, torch.int32), "snapshots": make.tensor(snapshots, torch.int32)}


MEMORIES = (
    Memory((3, 2, 8, 16), [(1, 3)]),
    Memory((2, 3, 16, 33), [(0, 0), (4, 2), (5, -1)], words=0),
    Memory((1, 24, 16, 1), [(2, 1)], words=700, versions=3),
    Memory((2, 70, 5, 3), [(3, 4), (1, 0)], versions=2),
    Memory((1, 2, 128, 128), [(3, 4)], words=2100),
    Memory((2, 1, 4, 8), []),
)
REAL = Memory((36, 32, 128, 128), [(1, 0)], words=442368, slots=3, snapshots=2)


def own_entries(name: str, written: Tensor, args: Mapping[str, Any]) -> Tensor:
    """For `Case.written`: all entries but a slot's scrap one."""
    return written[:-1] if name in ("state", "rest") else written
