"""Triton: wide_linear by the kernels of `fused_linear`, whose sums are float32 until they are stored."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.gemm.fused_linear.launch_constants import SHARED, Config, row_configs
from graphllm.ops.gemm.fused_linear.triton_fused_linear import launch_row, launch_tiles
from graphllm.ops.gemm.linear.operands import Matrix
from graphllm.ops.gemm.wide_linear.op import wide_linear

_TILES = (  # rows of weights, entries of each that a program takes at once, steps under way
    (64, 128, 4), (32, 256, 4), (64, 64, 6), (128, 64, 4), (16, 256, 4),
)  # fmt: skip
_LEAST_PART = 256  # inner entries of it


def _half(site: CallSite) -> bool:
    x_TI, weight_OI = site.args["x_TI"], site.args["weight_OI"]
    return (
        x_TI.dtype in (torch.bfloat16, torch.float16)
        and weight_OI.dtype == x_TI.dtype
        and x_TI.stride(-1) == weight_OI.stride(-1) == 1
        and x_TI.shape[1] % 8 == 0
    )


def _one_row(site: CallSite) -> bool:
    return _half(site) and site.rows("x_TI") == 1


def _parts(site: CallSite, programs: int) -> int:
    """Of sums: as many as let all programs run at once."""
    inner = site.args["x_TI"].shape[1]
    return next((n for n in (8, 4, 2) if n * programs <= site.target.multiprocessors and inner >= n * _LEAST_PART), 1)


def _tile_configs(site: CallSite) -> list[Config]:
    return list(_tiles(site))


def _tiles(site: CallSite) -> Iterator[Config]:
    width, rows = site.args["weight_OI"].shape[0], max(16, 1 << (site.rows("x_TI") - 1).bit_length())
    for block_t in sorted({min(128, rows), min(32, rows)}, reverse=True):
        for block_n, block_k, stages in _TILES[:1] if site.deterministic else _TILES:
            blocks, token_tiles = -(-width // block_n), rows // block_t
            fits = 2 * (block_n + block_t) * block_k * stages <= SHARED and block_n * block_t <= 64 * 128
            if fits and blocks * token_tiles <= 8 * site.target.multiprocessors:
                parts = _parts(site, blocks * (1 if site.deterministic else token_tiles))
                yield {"block_t": block_t, "block_n": block_n, "block_k": block_k, "splits": parts, "warps": 4,
                       "stages": stages, "token_tiles": token_tiles, "direct": 0}  # fmt: skip


def _sum_order(site: CallSite, constants: Config) -> str:
    """Hopper's instructions of 64 rows of weights go through the inner dimension in the same steps for any rows."""
    alike = site.target.arch[0] == "sm_90" and constants["block_n"] == 64 and site.deterministic
    return f"tensor cores, {constants['splits']} parts" if alike else ""


@wide_linear.impl("triton_row", device="cuda", supports=_one_row, configs=row_configs)
def triton_row(x_TI: Tensor, weight_OI: Tensor, **config: int) -> Tensor:
    """One row of x."""
    out_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]), dtype=torch.float32)
    launch_row(x_TI, Matrix(weight_OI), out_TO, config)
    return out_TO


@wide_linear.impl("triton_tile", device="cuda", supports=_half, configs=_tile_configs, row_order=_sum_order)
def triton_tile(x_TI: Tensor, weight_OI: Tensor, **config: int) -> Tensor:
    """Any number of rows of x."""
    out_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]), dtype=torch.float32)
    launch_tiles(x_TI, Matrix(weight_OI), out_TO, config)
    return out_TO
