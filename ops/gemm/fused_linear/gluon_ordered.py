"""Products on Hopper with rows that come out the same among few and many, and as `tile_kernel` computes them:
deterministic mode's use of the kernel of `gluon_product`.

The tensor cores add the products of 16 inner entries at a time, in an order that depends neither on how many rows an
instruction takes nor on where a row is among them, nor on which of both factors is the first. What is left is where
sums begin anew: few rows divide the inner dimension among programs, and what these make is added in order. Here one
program makes the same sums one after another and adds them in the same order, or leaves that to the next kernel.
"""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.gemm.fused_linear.gluon_product import BLOCK_K, hopper_product, stages_of
from graphllm.ops.gemm.fused_linear.launch_constants import (
    Config,
    is_ordered,
    length_of_range,
    ranges_of,
    reads_tiles,
    sum_order,
)
from graphllm.ops.gemm.fused_linear.op import MOST_ROWS, fused_linear
from graphllm.ops.gemm.fused_linear.triton_fused_linear import half, normalized
from graphllm.ops.gemm.linear.operands import Matrix, Norm

_FEWEST = 33  # rows of x; below, tiles of Triton's kernel are faster
_FEW = 64  # up to that many rows the groups of warps share the columns of a tile
_SUMS = 128 * 256  # numbers of a tile that two groups of four warps have registers for
_CANDIDATES = 3
_MOST_CHOSEN = 1024  # rows from which on the largest tiles are the fastest


def serves(site: CallSite) -> bool:
    """Whether this file's kernel serves a site: some rows of x, and no residual after a gate."""
    if site.rows("x_TI") < _FEWEST or (site.args.get("gated") and site.args["residual_TN"] is not None):
        return False
    return site.deterministic and is_ordered(site) and half(site) and reads_tiles(site)


def ordered_configs(site: CallSite) -> list[Config]:
    """Launch constants, the likely best first: of those with which most multiprocessors have work the largest tiles."""
    rows, processors, ranges = site.rows("x_TI"), site.target.multiprocessors, ranges_of(site)
    parts = "norm_O" in site.args and rows <= MOST_ROWS and ranges > 1
    most = _SUMS if parts or ranges == 1 else _SUMS // 2
    found = []
    # Steps of more rows are of many sizes, which tiles of 256 tokens would fill badly.
    for block_t in (64,) if rows <= _FEW else (128, 256) if 128 < rows <= MOST_ROWS else (128,):
        for block_n in (128, 64, 32) if rows <= _FEW else (256, 128, 64):
            items = -(-site.args["weight_OI"].shape[0] // block_n) * -(-rows // block_t) * (ranges if parts else 1)
            idle = items / (-(-items // processors) * processors) < 0.6
            if block_t * block_n <= most:
                found.append((idle, -block_t * block_n, block_t, block_n))
    few = rows <= _MOST_CHOSEN
    return [
        {"block_t": block_t, "block_n": block_n, "stages": _stages(site, block_t, block_n), "ranges": ranges,
         "steps": length_of_range(site) // BLOCK_K.value, "parts": int(parts), "together": together,
         "programs": processors}
        for _, _, block_t, block_n in sorted(found)[: _CANDIDATES if few else 1]
        for together in ((16,) if few else (16, 8))
    ]  # fmt: skip


def _stages(site: CallSite, block_t: int, block_n: int) -> int:
    """In what shared memory is left by the bytes that put rows together."""
    return stages_of(block_t, block_n, block_t * block_n // (2 if site.args.get("gated") else 1))


def launch_ordered(
    x_TI: Tensor, matrix: Matrix, out: Tensor, config: Config, residual_TN: Tensor | None = None, gated: bool = False
) -> None:
    """Products of x with the weights into ``out`` [T, N], or, with the launch constant "parts", the ranges of their
    sums into [ranges, T, N]."""
    weight_OI, bias_O = matrix[:2]
    (T, K), N = x_TI.shape, weight_OI.shape[0]
    bias, residual = (x_TI if t is None else t for t in (bias_O, residual_TN))
    hopper_product(
        config["programs"], x_TI, weight_OI, bias, residual, out, T, X_ROW=x_TI.stride(0),
        WEIGHT_ROW=weight_OI.stride(0), RESIDUAL_ROW=0 if residual_TN is None else residual_TN.stride(0), N=N, K=K,
        BIAS=bias_O is not None, GATED=gated, ALIKE=True, BLOCK_T=config["block_t"], BLOCK_N=config["block_n"],
        RANGES=config["ranges"], PER_RANGE=config["steps"], PARTS=config["parts"] == 1, STAGES=config["stages"],
        TOGETHER=config["together"],
    )  # fmt: skip


@fused_linear.impl("gluon_ordered", device="cuda", supports=serves, configs=ordered_configs, row_order=sum_order)
def gluon_ordered(
    x_TI: Tensor, matrix: Matrix, before: Norm | None, residual_TN: Tensor | None, gated: bool, **config: int
) -> Tensor:
    """Any number of rows of x."""
    out_TN = x_TI.new_empty((x_TI.shape[0], matrix.width(gated)))
    launch_ordered(normalized(x_TI, before), matrix, out_TN, config, residual_TN, gated)
    return out_TN
