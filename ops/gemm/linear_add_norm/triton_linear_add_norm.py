"""linear_add_norm on the kernels of `fused_linear`: the product, for few rows in parts, then one kernel that sums them,
over ranks as well, adds the residual and normalizes. The sum over parts costs no launch of its own, nor does that over
ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ir.groups import TENSOR
from graphllm.ops.collectives.all_reduce.extern import summed
from graphllm.ops.collectives.all_reduce.triton_exchange import fits_exchange
from graphllm.ops.gemm.fused_linear.gluon_int4_row import int4_row, int4_row_configs, launch_int4_row
from graphllm.ops.gemm.fused_linear.gluon_int4_tile import int4_tile, int4_tile_configs, launch_int4_tile
from graphllm.ops.gemm.fused_linear.gluon_ordered import launch_ordered, ordered_configs, serves
from graphllm.ops.gemm.fused_linear.launch_constants import beside_rows, row_configs, sum_order, tile_configs
from graphllm.ops.gemm.fused_linear.triton_fused_linear import (
    launch_norm,
    launch_row,
    launch_tiles,
    one_row,
    plain,
    short,
)
from graphllm.ops.gemm.linear.operands import Matrix
from graphllm.ops.gemm.linear_add_norm.op import AddNorm, linear_add_norm
from graphllm.ops.lora.add_lora.operands import LowRank
from graphllm.ops.lora.add_lora.triton_low_rank import shrunk


def _exchanged(site: CallSite) -> bool:
    """Whether the kernel that normalizes can sum over the ranks."""
    ranks, width = site.args["ranks"], site.args["weight_OI"].shape[0]
    return ranks == 1 or fits_exchange(site, "residual_TO", width, ranks)


def _row(site: CallSite) -> bool:
    return site.args["ranks"] > 1 and one_row(site) and _exchanged(site)


def _finished(
    product: Tensor, after: AddNorm, bias_O: Tensor | None = None, parts: int = 1, ranks: int = 1, alike: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum and its norm, by one kernel. product: [T, O], or parts of it [parts, T, O]."""
    residual_TO, norm_O, eps = after
    sum_TO, normed_TO = (torch.empty_like(residual_TO, memory_format=torch.contiguous_format) for _ in range(2))
    launch_norm(product, norm_O, eps, normed_TO, parts, bias_O, residual_TO, sum_TO, ranks, alike)
    return sum_TO, normed_TO


def _sums(x_TI: Tensor, matrix: Matrix, *parts: int) -> Tensor:
    """Memory for the products, in float32."""
    return torch.empty((*parts, x_TI.shape[0], matrix.width(False)), dtype=torch.float32, device=x_TI.device)


@linear_add_norm.impl("triton_row", device="cuda", supports=_row, configs=row_configs)
def triton_row(
    x_TI: Tensor, matrix: Matrix, after: AddNorm, lora: LowRank | None, ranks: int, **config: int
) -> tuple[Tensor, Tensor]:
    """One row of x, where the sum over ranks has a kernel anyway."""
    product_TO = _sums(x_TI, matrix)
    launch_row(x_TI, matrix._replace(bias_O=None), product_TO, config, adapters=shrunk(x_TI, lora))
    return _finished(product_TO, after, matrix.bias_O, ranks=ranks)


@linear_add_norm.impl(
    "gluon_int4_row",
    device="cuda",
    supports=lambda site: int4_row(site) and _exchanged(site),
    configs=int4_row_configs,
)
def gluon_int4_row(x_TI: Tensor, matrix: Matrix, after: AddNorm, ranks: int, **config: int) -> tuple[Tensor, Tensor]:
    """One row of x and int4 weights."""
    product_TO = _sums(x_TI, matrix)
    launch_int4_row(x_TI, matrix._replace(bias_O=None), product_TO, config)
    return _finished(product_TO, after, matrix.bias_O, ranks=ranks)


@linear_add_norm.impl(
    "gluon_int4_tile",
    device="cuda",
    supports=lambda site: int4_tile(site) and _exchanged(site),
    configs=lambda site: int4_tile_configs(site, splits=True),
)
def gluon_int4_tile(x_TI: Tensor, matrix: Matrix, after: AddNorm, ranks: int, **config: int) -> tuple[Tensor, Tensor]:
    """Some rows of x and int4 weights."""
    parts = _sums(x_TI, matrix, config["splits"])
    launch_int4_tile(x_TI, matrix._replace(bias_O=None), parts, config)
    return _finished(parts, after, matrix.bias_O, config["splits"], ranks)


@linear_add_norm.impl("cublas", device="cuda", supports=lambda site: plain(site) and _exchanged(site))
def cublas(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, after: AddNorm, ranks: int) -> tuple[Tensor, Tensor]:
    """The library's product, then one kernel that adds and normalizes."""
    return _finished(torch.nn.functional.linear(x_TI, weight_OI, bias_O), after, ranks=ranks)


@linear_add_norm.impl("cublas_group", device="cuda", supports=lambda site: plain(site) and not _exchanged(site))
def cublas_group(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, after: AddNorm, ranks: int
) -> tuple[Tensor, Tensor]:
    """The library's product, summed by the group, then one kernel that adds and normalizes."""
    return _finished(summed(torch.nn.functional.linear(x_TI, weight_OI, bias_O), TENSOR, ranks), after)


@linear_add_norm.impl(
    "triton_tile",
    device="cuda",
    supports=lambda site: short(site) and _exchanged(site),
    configs=lambda site: beside_rows(site) if _row(site) else tile_configs(site),
    row_order=sum_order,
)
def triton_tile(
    x_TI: Tensor, matrix: Matrix, after: AddNorm, lora: LowRank | None, ranks: int, **config: int
) -> tuple[Tensor, Tensor]:
    """Up to ``MOST_ROWS`` rows of x."""
    adapters = shrunk(x_TI, lora, config["low_rows"], config["low_splits"])
    parts = _sums(x_TI, matrix, config["splits"])
    launch_tiles(x_TI, matrix._replace(bias_O=None), parts, config, parts=True, adapters=adapters)
    return _finished(parts, after, matrix.bias_O, config["splits"], ranks, config.get("alike") == 1)


@linear_add_norm.impl("gluon_ordered", device="cuda", supports=serves, configs=ordered_configs, row_order=sum_order)
def gluon_ordered(x_TI: Tensor, matrix: Matrix, after: AddNorm, **config: int) -> tuple[Tensor, Tensor]:
    """Any number of rows of x, each as `triton_tile` computes it."""
    if config["parts"]:
        parts = _sums(x_TI, matrix, config["ranges"])
        launch_ordered(x_TI, matrix._replace(bias_O=None), parts, config)
        return _finished(parts, after, matrix.bias_O, config["ranges"], alike=True)
    residual_TO, norm_O, eps = after
    sum_TO, normed_TO = (torch.empty_like(residual_TO, memory_format=torch.contiguous_format) for _ in range(2))
    launch_ordered(x_TI, matrix, sum_TO, config, residual_TO)
    launch_norm(sum_TO, norm_O, eps, normed_TO)
    return sum_TO, normed_TO
