"""save_snapshots: recurrent states of slots, kept as codes of 8 bits with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, op

MOST_CODE = 127  # codes are from -127 to 127
LEAST_SCALE = 1e-37  # smaller scales are 0, since float32 has no reciprocal of them


def _cost(state: Tensor, rest: Tensor, slots: Tensor, scales: Tensor) -> Cost:
    P, numbers, scaled = slots.shape[0], state[0, 0].numel(), scales[0].numel()
    moved = numbers * (state.element_size() + 1) + 4 * scaled + 2 * 4 * rest.shape[2]
    return Cost(P * moved, 3 * P * numbers)


@op(boundary=True, mutates=("codes", "scales", "kept"), cost=_cost)
def save_snapshots(
    state: Tensor,
    rest: Tensor,
    version: Tensor | None,
    slots: Tensor,
    snapshots: Tensor,
    codes: Tensor,
    scales: Tensor,
    kept: Tensor,
) -> None:
    """Write the valid states of slots to snapshots, rounded to 8 bits. R numbers share a scale, the largest magnitude
    of them / 127:

        scales = max |state| / 127 over R;  codes = state / scales, rounded to the nearest integer

    in float32. A scale below 1e-37 is 0, and so are its codes. A scale is NaN where one of its numbers is not finite.

    state: [N, versions, L, H, R, C], L states of a slot side by side.
    rest: other states of a slot, [N, versions, B] int32; they are copied.
    version: the valid version of the first slots, int32; of the others, and with None, it is the first one.
    slots: of each pair, [P] int32.
    snapshots: of each pair, [P] int32; of a negative one nothing is written.
    codes: [M, L, H, R, C] int8.
    scales: [M, L, H, C] float32.
    kept: [M, B] int32.
    """
    exact = torch.promote_types(state.dtype, torch.float32)
    for slot, snapshot in zip(slots.tolist(), snapshots.tolist(), strict=True):
        if snapshot < 0:
            continue
        valid = 0 if version is None or slot >= len(version) else int(version[slot])
        x_LHRC = state[slot, valid].to(exact)
        scales_LHC = x_LHRC.abs().amax(2) / MOST_CODE
        scales_LHC = torch.where(scales_LHC < LEAST_SCALE, 0.0, scales_LHC) + (x_LHRC * 0.0).sum(2)
        numbers = torch.where(scales_LHC[:, :, None] > 0, x_LHRC / scales_LHC[:, :, None], 0.0)
        codes[snapshot] = numbers.round().to(torch.int8)
        scales[snapshot] = scales_LHC
        kept[snapshot] = rest[slot, valid]


@save_snapshots.fake
def _(state: Tensor, rest: Tensor, slots: Tensor, codes: Tensor, scales: Tensor, kept: Tensor) -> None:
    L, H, R, C = state.shape[2:]
    torch._check(codes.shape[1:] == (L, H, R, C), lambda: f"codes {codes.shape} for states {state.shape}")
    torch._check(scales.shape[1:] == (L, H, C), lambda: f"scales {scales.shape} for states {state.shape}")
    torch._check(kept.shape[1] == rest.shape[2], lambda: f"{kept.shape[1]} words for {rest.shape[2]}")
