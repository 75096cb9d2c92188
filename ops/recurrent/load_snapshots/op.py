"""load_snapshots: recurrent states of slots from codes of 8 bits with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, op


def _cost(scales: Tensor, kept: Tensor, slots: Tensor, state: Tensor) -> Cost:
    P, numbers, scaled = slots.shape[0], state[0, 0].numel(), scales[0].numel()
    moved = numbers * (state.element_size() + 1) + 4 * scaled + 2 * 4 * kept.shape[1]
    return Cost(P * moved, P * numbers)


@op(boundary=True, mutates=("state", "rest"), cost=_cost)
def load_snapshots(
    codes: Tensor, scales: Tensor, kept: Tensor, slots: Tensor, snapshots: Tensor, state: Tensor, rest: Tensor
) -> None:
    """Write what `save_snapshots` has kept to the first version of slots: codes * scales in float32, rounded once.

    codes: [M, L, H, R, C] int8.
    scales: [M, L, H, C] float32.
    kept: [M, B] int32.
    slots: of each pair, [P] int32; the last one, of padding, is scrap.
    snapshots: of each pair, [P] int32; of a negative one nothing is read or written.
    state: [N, versions, L, H, R, C].
    rest: [N, versions, B] int32.
    """
    exact = torch.promote_types(state.dtype, torch.float32)
    for slot, snapshot in zip(slots.tolist(), snapshots.tolist(), strict=True):
        if snapshot >= 0:
            state[slot, 0] = codes[snapshot].to(exact) * scales[snapshot].to(exact)[:, :, None]
            rest[slot, 0] = kept[snapshot]


@load_snapshots.fake
def _(codes: Tensor, scales: Tensor, kept: Tensor, slots: Tensor, state: Tensor, rest: Tensor) -> None:
    L, H, R, C = state.shape[2:]
    torch._check(codes.shape[1:] == (L, H, R, C), lambda: f"codes {codes.shape} for states {state.shape}")
    torch._check(scales.shape[1:] == (L, H, C), lambda: f"scales {scales.shape} for states {state.shape}")
    torch._check(kept.shape[1] == rest.shape[2], lambda: f"{kept.shape[1]} words for {rest.shape[2]}")
