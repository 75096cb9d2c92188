"""scaled_linear with few rows by Triton: float8 weights stream through once, and so do half as many bytes of x.

With bf16 rows, every tile of weights reads as many bytes of x as of weights or more, and the L2 cache is what limits
the product. Rows of float8 halve them, and nothing is decoded: both operands go from shared memory to the tensor cores.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.gemm.fused_linear.triton_fused_linear import fetch_ahead, finish_splits, weight_rows
from graphllm.ops.gemm.scaled_linear.library import FEWEST
from graphllm.ops.gemm.scaled_linear.op import scaled_linear


@triton.jit(do_not_specialize_on_alignment=["T"])
def scaled_tile_kernel(
    x_ptr,  # [T, K / 2] int16: float8 in pairs
    row_scales_ptr,  # [T]
    weight_ptr,  # [N, K / 2] int16
    scales_ptr,  # [N]
    residual_ptr, out_ptr,
    partial_ptr,  # as in `tile_kernel` of fused_linear
    arrived_ptr, T, N: tl.constexpr, K: tl.constexpr, RESIDUAL_ROW: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides K
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,  # bytes of every weight row that are fetched to the L2 cache before x is there
    EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    split = tl.program_id(1)
    tile_t = tl.program_id(2)
    row, in_row = weight_rows(block, N, GATED, BLOCK_N)
    PER_SPLIT: tl.constexpr = (K // BLOCK_K + SPLITS - 1) // SPLITS
    lo = split * PER_SPLIT
    hi = tl.minimum(lo + PER_SPLIT, K // BLOCK_K)
    weights = weight_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    weight_row = weights + row.to(tl.int64)[:, None] * K
    token = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    if not EMULATED:
        if AHEAD > 0:
            fetch_ahead(weights, weight_row, in_row, lo * BLOCK_K, K, AHEAD)
        tl.extra.cuda.gdc_wait()
    x_row = x_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + token.to(tl.int64)[:, None] * K
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for tile in range(lo, hi):
        at = tile * BLOCK_K + k
        if N % BLOCK_N == 0:
            weight = tl.load(weight_row + at[None, :])
        else:
            weight = tl.load(weight_row + at[None, :], mask=in_row[:, None], other=0.0)
        x = tl.load(x_row + at[None, :], mask=(token < T)[:, None], other=0.0)
        if EMULATED:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    acc *= tl.load(scales_ptr + row, mask=in_row, other=0.0)[:, None]
    acc *= tl.load(row_scales_ptr + token, mask=token < T, other=0.0)[None, :]
    finish_splits(
        acc, block, split, tile_t, token, T, residual_ptr, residual_ptr, out_ptr, partial_ptr, arrived_ptr,
        N, RESIDUAL_ROW, False, RESIDUAL, GATED, SPLITS, BLOCK_N, BLOCK_T,
    )  # fmt: skip


Config = Mapping[str, int]
_TILES = (  # block_n, block_k, stages, warps
    (64, 128, 6, 4), (128, 256, 3, 8), (64, 256, 4, 4), (64, 512, 3, 4), (128, 128, 4, 8),
)  # fmt: skip
_LEAST, _MOST = 96, 640  # programs that a launch should have
_SHARED = 227 * 1024  # bytes of shared memory that one program may use on sm_90
_AHEAD = 512
_FEWEST_ROWS = 17  # fewer keep x as it is, and from FEWEST on the library's product is faster


def _supports(site: CallSite) -> bool:
    native = {"sm_89", "sm_90"} & set(site.target.arch) or not site.target.arch
    dtypes = ("bfloat16", "float16")
    few = _FEWEST_ROWS <= site.rows("codes_TW") < FEWEST
    contiguous = all(site.args[n].is_contiguous() for n in ("codes_TW", "row_scales_T1", "weight_OW", "scales_1O"))
    residual = site.args["residual_TN"]
    fits = residual is None or (residual.stride(-1) == 1 and str(residual.dtype) == f"torch.{site.args['dtype']}")
    return bool(native) and few and contiguous and fits and site.args["dtype"] in dtypes


def configs(site: CallSite) -> list[Config]:
    """Launch constants at a site."""
    most = 1 << (site.rows("codes_TW") - 1).bit_length()
    width, inner = site.args["weight_OW"].shape[0], 2 * site.args["weight_OW"].shape[1]
    found: list[Config] = []
    usual = min(128, most)
    for block_t in sorted({usual, min(64, most), max(32, usual // 2)}, reverse=True):
        token_tiles = -(-most // block_t)
        for block_n, block_k, stages, warps in _TILES:
            shared = (block_n + block_t) * block_k * stages
            if inner % block_k or shared > _SHARED or block_n * block_t > 64 * 32 * warps:
                continue
            if block_t < usual and block_n > 64:  # smaller tiles are for more programs
                continue
            programs, tiles = -(-width // block_n) * token_tiles, inner // block_k
            possible = [n for n in (1, 2, 4, 8) if n <= tiles]
            filling = [n for n in possible if _LEAST <= programs * n <= _MOST]
            for splits in filling[:2] or [possible[-1] if programs < _LEAST else 1]:
                found.append({"block_t": block_t, "block_n": block_n, "block_k": block_k, "splits": splits,
                              "stages": stages, "warps": warps, "token_tiles": token_tiles})  # fmt: skip
    return found


@scaled_linear.impl("triton_tile", device="cuda", supports=_supports, configs=configs)
def triton_tile(
    codes_TW: Tensor, row_scales_T1: Tensor, weight_OW: Tensor, scales_1O: Tensor, dtype: str,
    residual_TN: Tensor | None = None, gated: bool = False, **config: int,
) -> Tensor:  # fmt: skip
    """Some rows. Sums keep 14 bits on tensor cores, as the library's do."""
    (T, W), N = codes_TW.shape, weight_OW.shape[0]
    out_TN = codes_TW.new_empty((T, N // 2 if gated else N), dtype=getattr(torch, dtype))
    blocks, splits = -(-N // config["block_n"]), config["splits"]
    count = blocks * config["token_tiles"] if splits > 1 else 0
    partial = row_scales_T1
    if count:
        size = count * splits * config["block_n"] * config["block_t"]
        partial = torch.empty(size, dtype=torch.float32, device=codes_TW.device)
    residual_row = 0 if residual_TN is None else residual_TN.stride(0)
    launch_triton(
        scaled_tile_kernel, (blocks, splits, config["token_tiles"]), codes_TW, row_scales_T1, weight_OW, scales_1O,
        row_scales_T1 if residual_TN is None else residual_TN, out_TN, partial,
        zeroed(codes_TW, count) if count else row_scales_T1, T, N=N, K=2 * W, RESIDUAL_ROW=residual_row,
        RESIDUAL=residual_TN is not None, GATED=gated, BLOCK_T=config["block_t"], BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"], SPLITS=splits, AHEAD=_AHEAD if 2 * W // splits >= _AHEAD else 0,
        EMULATED=triton.knobs.runtime.interpret, num_warps=config["warps"], num_stages=config["stages"],
    )  # fmt: skip
    return out_TN
