"""ssd_scan's implementations on a GPU: prompts in tiles of tokens by tensor cores, all else token by token."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ir.gluon import runs_gluon
from graphllm.ir.op import each_alone
from graphllm.ops.recurrent.slots import Slots, exporting
from graphllm.ops.recurrent.ssd_scan.cpu import plain
from graphllm.ops.recurrent.ssd_scan.gluon_tiles import TILE, launch_hopper_tiles
from graphllm.ops.recurrent.ssd_scan.op import ssd_scan
from graphllm.ops.recurrent.ssd_scan.triton_tiles import FEW, launch_decays, launch_tiles
from graphllm.ops.recurrent.ssd_scan.triton_tokens import launch_tokens

_ANY = 1 << 30  # tokens of a sequence


def _by_tokens(site: CallSite) -> bool:
    return max(site.args[name].dtype.itemsize for name in ("x_THP", "state")) <= 4 and plain(site)


def _by_tiles(site: CallSite) -> bool:
    """Whether tiles serve: heads of 64 numbers, and 16-bit rows that begin at multiples of 16 bytes, for the copy
    engine. Where a tile begins decides the order of sums: a prompt in chunks is not computed as it is whole."""
    x_THP, B_TGN, C_TGN, state = (site.args[name] for name in ("x_THP", "B_TGN", "C_TGN", "state"))
    return (
        _by_tokens(site)
        and site.bucket.kind == "mixed"
        and not site.deterministic
        and x_THP.dtype.itemsize == 2
        and all(t.stride(0) % 8 == t.storage_offset() % 8 == 0 for t in (x_THP, B_TGN, C_TGN))
        and state.shape[3] == 64
        and state.shape[4] in (64, 128)
        and state.shape[1] <= FEW
    )


def _by_gluon(site: CallSite) -> bool:
    return runs_gluon(site.target) and _by_tiles(site)


def _token_configs(site: CallSite) -> list[dict[str, int]]:
    """Deterministic steps of all kinds have the same instructions."""
    if site.deterministic:
        return [{"most": _ANY, "block": 16, "num_warps": 2, "single": 0}]
    most = 1 if site.bucket.kind == "decode" and site.bucket.query_len == 1 else _ANY
    sizes = ((16, 2), (32, 2), (32, 4), (64, 4))
    return [{"most": most, "block": block, "num_warps": warps, "single": 1} for block, warps in sizes]


def _tile_configs(site: CallSite) -> list[dict[str, int]]:
    return [{"tile": 64, "num_warps": 4, "num_stages": 3}]


def _gluon_configs(site: CallSite) -> list[dict[str, int]]:
    return [{"num_stages": 3}, {"num_stages": 2}]


@ssd_scan.impl("gluon_tiles", device="cuda", supports=_by_gluon, configs=_gluon_configs)
@exporting
def gluon_tiles(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    state: Tensor,
    at: Slots,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    dt_min: float,
    dt_max: float,
    exports: Tensor | None,
    *,
    num_stages: int,
) -> Tensor:
    """Three kernels: decays of all tokens; sequences of few tokens, token by token; the other ones in tiles."""
    out_THP, limits = x_THP.new_empty(x_THP.shape), (dt_min, dt_max)
    sums = launch_decays(dt_TH, A_H, dt_bias_H, at, limits, TILE)
    launch_tokens(x_THP, dt_TH, A_H, B_TGN, C_TGN, state, at, D_H, dt_bias_H, limits, out_THP, most=FEW)
    launch_hopper_tiles(x_THP, B_TGN, C_TGN, D_H, sums, state, out_THP, at, exports, num_stages=num_stages)
    return out_THP


@ssd_scan.impl("triton_tiles", device="cuda", supports=_by_tiles, configs=_tile_configs)
@exporting
def triton_tiles(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    state: Tensor,
    at: Slots,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    dt_min: float,
    dt_max: float,
    exports: Tensor | None,
    *,
    tile: int,
    num_warps: int,
    num_stages: int,
) -> Tensor:
    """The same where Gluon does not serve."""
    out_THP, limits = x_THP.new_empty(x_THP.shape), (dt_min, dt_max)
    sums = launch_decays(dt_TH, A_H, dt_bias_H, at, limits, tile)
    launch_tokens(x_THP, dt_TH, A_H, B_TGN, C_TGN, state, at, D_H, dt_bias_H, limits, out_THP, most=FEW)
    launch_tiles(
        x_THP, B_TGN, C_TGN, D_H, sums, state, out_THP, at, exports, num_warps=num_warps, num_stages=num_stages
    )
    return out_THP


@ssd_scan.impl("triton", device="cuda", supports=_by_tokens, configs=_token_configs, row_order=each_alone)
def triton_ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    state: Tensor,
    at: Slots,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    dt_min: float,
    dt_max: float,
    *,
    most: int,
    block: int,
    num_warps: int,
    single: int,
) -> Tensor:
    """The recurrence as it is written, token by token."""
    out_THP, limits = x_THP.new_empty(x_THP.shape), (dt_min, dt_max)
    launch_tokens(
        *(x_THP, dt_TH, A_H, B_TGN, C_TGN, state, at, D_H, dt_bias_H, limits, out_THP),
        most=most, block=block, num_warps=num_warps, single=single,
    )  # fmt: skip
    return out_THP
