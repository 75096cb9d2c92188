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
from graphllm.ops.gemm.linear_add_norm.op import linear_add_norm
from graphllm.ops.lora.add_lora.triton_low_rank import shrunk


def _exchanged(site: CallSite) -> bool:
    """Whether the kernel that normalizes can sum over the ranks."""
    ranks, width = site.args["ranks"], site.args["weight_OI"].shape[0]
    return ranks == 1 or fits_exchange(site, "residual_TO", width, ranks)


def _row(site: CallSite) -> bool:
    return site.args["ranks"] > 1 and one_row(site) and _exchanged(site)


@linear_add_norm.impl("triton_row", device="cuda", supports=_row, configs=row_configs)
def triton_row(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    bias_O: Tensor | None = None,
    scales_GO: Tensor | None = None,
    form: str = "",
    a_LRI: Tensor | None = None,
    b_LrO: Tensor | None = None,
    adapter_ids_T: Tensor | None = None,
    widths: list[int] | None = None,
    ranks: int = 1,
    **config: int,
) -> tuple[Tensor, Tensor]:
    """One row of x, where the sum over ranks has a kernel anyway."""
    adapters = shrunk(x_TI, a_LRI, b_LrO, adapter_ids_T, widths)
    product_TO = torch.empty((x_TI.shape[0], weight_OI.shape[0]), dtype=torch.float32, device=x_TI.device)
    launch_row(x_TI, weight_OI, product_TO, config, scales_GO=scales_GO, form=form, adapters=adapters)
    sum_TO, normed_TO = (torch.empty_like(product_TO, dtype=x_TI.dtype) for _ in range(2))
    launch_norm(product_TO, norm_O, eps, normed_TO, 1, bias_O, residual_TO, sum_TO, ranks)
    return sum_TO, normed_TO


@linear_add_norm.impl(
    "gluon_int4_row",
    device="cuda",
    supports=lambda site: int4_row(site) and _exchanged(site),
    configs=int4_row_configs,
)
def gluon_int4_row(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    scales_GO: Tensor,
    bias_O: Tensor | None = None,
    zeros_GO: Tensor | None = None,
    ranks: int = 1,
    **config: int,
) -> tuple[Tensor, Tensor]:
    """One row of x and int4 weights."""
    product_TO = torch.empty((x_TI.shape[0], weight_OI.shape[0]), dtype=torch.float32, device=x_TI.device)
    launch_int4_row(x_TI, weight_OI, scales_GO, zeros_GO, product_TO, config)
    sum_TO, normed_TO = (torch.empty_like(product_TO, dtype=x_TI.dtype) for _ in range(2))
    launch_norm(product_TO, norm_O, eps, normed_TO, 1, bias_O, residual_TO, sum_TO, ranks)
    return sum_TO, normed_TO


@linear_add_norm.impl(
    "gluon_int4_tile",
    device="cuda",
    supports=lambda site: int4_tile(site) and _exchanged(site),
    configs=lambda site: int4_tile_configs(site, splits=True),
)
def gluon_int4_tile(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    scales_GO: Tensor,
    bias_O: Tensor | None = None,
    zeros_GO: Tensor | None = None,
    ranks: int = 1,
    **config: int,
) -> tuple[Tensor, Tensor]:
    """Some rows of x and int4 weights."""
    shape = (x_TI.shape[0], weight_OI.shape[0])
    parts = torch.empty((config["splits"], *shape), dtype=torch.float32, device=x_TI.device)
    launch_int4_tile(x_TI, weight_OI, scales_GO, zeros_GO, parts, config)
    sum_TO, normed_TO = x_TI.new_empty(shape), x_TI.new_empty(shape)
    launch_norm(parts, norm_O, eps, normed_TO, config["splits"], bias_O, residual_TO, sum_TO, ranks)
    return sum_TO, normed_TO


@linear_add_norm.impl("cublas", device="cuda", supports=lambda site: plain(site) and _exchanged(site))
def cublas(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    bias_O: Tensor | None = None,
    ranks: int = 1,
) -> tuple[Tensor, Tensor]:
    """The library's product, then one kernel that adds and normalizes."""
    product_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    sum_TO, normed_TO = torch.empty_like(product_TO), torch.empty_like(product_TO)
    launch_norm(product_TO, norm_O, eps, normed_TO, 1, None, residual_TO, sum_TO, ranks)
    return sum_TO, normed_TO


@linear_add_norm.impl("cublas_group", device="cuda", supports=lambda site: plain(site) and not _exchanged(site))
def cublas_group(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    bias_O: Tensor | None = None,
    ranks: int = 1,
) -> tuple[Tensor, Tensor]:
    """The library's product, summed by the group, then one kernel that adds and normalizes."""
    product_TO = summed(torch.nn.functional.linear(x_TI, weight_OI, bias_O), TENSOR, ranks)
    sum_TO, normed_TO = torch.empty_like(product_TO), torch.empty_like(product_TO)
    launch_norm(product_TO, norm_O, eps, normed_TO, 1, None, residual_TO, sum_TO)
    return sum_TO, normed_TO


@linear_add_norm.impl(
    "triton_tile",
    device="cuda",
    supports=lambda site: short(site) and _exchanged(site),
    configs=lambda site: beside_rows(site) if _row(site) else tile_configs(site),
    row_order=sum_order,
)
def triton_tile(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    bias_O: Tensor | None = None,
    scales_GO: Tensor | None = None,
    zeros_GO: Tensor | None = None,
    form: str = "",
    group: int = 0,
    a_LRI: Tensor | None = None,
    b_LrO: Tensor | None = None,
    adapter_ids_T: Tensor | None = None,
    widths: list[int] | None = None,
    ranks: int = 1,
    **config: int,
) -> tuple[Tensor, Tensor]:
    """Up to ``MOST_ROWS`` rows of x."""
    shape = (x_TI.shape[0], weight_OI.shape[0])
    low = (config["low_rows"], config["low_splits"])
    adapters = shrunk(x_TI, a_LRI, b_LrO, adapter_ids_T, widths, *low)
    parts = torch.empty((config["splits"], *shape), dtype=torch.float32, device=x_TI.device)
    launch_tiles(
        x_TI, weight_OI, parts, config, encoded=(scales_GO, zeros_GO, form, group), parts=True, adapters=adapters
    )
    sum_TO, normed_TO = x_TI.new_empty(shape), x_TI.new_empty(shape)
    alike = config.get("alike") == 1
    launch_norm(parts, norm_O, eps, normed_TO, config["splits"], bias_O, residual_TO, sum_TO, ranks, alike)
    return sum_TO, normed_TO


@linear_add_norm.impl("gluon_ordered", device="cuda", supports=serves, configs=ordered_configs, row_order=sum_order)
def gluon_ordered(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    bias_O: Tensor | None = None,
    **config: int,
) -> tuple[Tensor, Tensor]:
    """Any number of rows of x, each as `triton_tile` computes it."""
    shape = (x_TI.shape[0], weight_OI.shape[0])
    sum_TO, normed_TO = x_TI.new_empty(shape), x_TI.new_empty(shape)
    if config["parts"]:
        parts = torch.empty((config["ranges"], *shape), dtype=torch.float32, device=x_TI.device)
        launch_ordered(x_TI, weight_OI, parts, config)
        launch_norm(parts, norm_O, eps, normed_TO, config["ranges"], bias_O, residual_TO, sum_TO, alike=True)
    else:
        launch_ordered(x_TI, weight_OI, sum_TO, config, bias_O, residual_TO)
        launch_norm(sum_TO, norm_O, eps, normed_TO)
    return sum_TO, normed_TO
