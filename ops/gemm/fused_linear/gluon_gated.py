"""Gated products of many rows on Hopper, by the kernel of `gluon_product`.

What it saves against the library's product is the gate, which needs no kernel of its own, and the start. Without a
gate, or in parts of sums, it was slower than the library's in most sizes (bench/notes/gpu_decode.md).
"""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.gemm.fused_linear.gluon_product import hopper_product, stages_of
from graphllm.ops.gemm.fused_linear.launch_constants import Config, read_by_tma
from graphllm.ops.gemm.fused_linear.op import MOST_ROWS, fused_linear
from graphllm.ops.gemm.fused_linear.triton_fused_linear import normalized, plain
from graphllm.ops.gemm.linear.operands import Matrix, Norm

_FEWEST_ROWS = 33  # below, tiles of Triton's kernel read the weights as fast
_SUMS = 128 * 256  # numbers of a tile that two groups of four warps have registers for
_CANDIDATES = 3


def _serves(site: CallSite) -> bool:
    return read_by_tma(site) and plain(site) and site.rows("x_TI") >= _FEWEST_ROWS


def _configs(site: CallSite) -> list[Config]:
    """Launch constants, the likely best first: of those with which most multiprocessors have work the largest tiles."""
    rows, processors = site.rows("x_TI"), site.target.multiprocessors
    if rows > MOST_ROWS:
        return [_config(site, 128, 256)]
    found = []
    for block_t in (64,) if rows <= 64 else (128,) if rows <= 128 else (128, 256):
        for block_n in (256, 128, 64):
            tiles = -(-site.args["weight_OI"].shape[0] // block_n) * -(-rows // block_t)
            idle = tiles / (-(-tiles // processors) * processors) < 0.6
            if block_t * block_n <= _SUMS and block_t + block_n > 128:
                found.append((idle, -block_t * block_n, block_t, block_n))
    return [_config(site, block_t, block_n) for _, _, block_t, block_n in sorted(found)[:_CANDIDATES]]


def _config(site: CallSite, block_t: int, block_n: int) -> Config:
    stages = stages_of(block_t, block_n, block_t * block_n // 2)  # bytes by which a tile's rows are put together
    return {"block_t": block_t, "block_n": block_n, "stages": stages, "programs": site.target.multiprocessors}


@fused_linear.impl("gluon_gated", device="cuda", supports=_serves, configs=_configs)
def gluon_gated(
    x_TI: Tensor, matrix: Matrix, before: Norm | None, *, block_t: int, block_n: int, stages: int, programs: int
) -> Tensor:
    """Sums, bias and gate in float32, then rounded."""
    weight_OI, bias_O = matrix[:2]
    x_TI = normalized(x_TI, before)
    (T, K), N = x_TI.shape, weight_OI.shape[0]
    out_TN = x_TI.new_empty((T, N // 2))
    hopper_product(
        programs, x_TI, weight_OI, x_TI if bias_O is None else bias_O, x_TI, out_TN, T, X_ROW=x_TI.stride(0),
        WEIGHT_ROW=weight_OI.stride(0), RESIDUAL_ROW=0, N=N, K=K, BIAS=bias_O is not None, GATED=True, ALIKE=False,
        BLOCK_T=block_t, BLOCK_N=block_n, RANGES=1, PER_RANGE=1, PARTS=False, STAGES=stages, TOGETHER=16,
    )  # fmt: skip
    return out_TN
