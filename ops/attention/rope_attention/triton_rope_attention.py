"""rope_attention on the kernels of `paged_attention`, which rotate queries and keys on the way in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.paged_attention.gluon_prefill import flash_configs, is_flash
from graphllm.ops.attention.paged_attention.gluon_prefill import gluon_prefill as hopper_prefill
from graphllm.ops.attention.paged_attention.gluon_ranges import flash_range_configs, in_flash_ranges
from graphllm.ops.attention.paged_attention.gluon_ranges import gluon_ranges as hopper_ranges
from graphllm.ops.attention.paged_attention.triton_common import Rotary, problem
from graphllm.ops.attention.paged_attention.triton_decode import decode_configs, is_decode
from graphllm.ops.attention.paged_attention.triton_decode import triton_decode as decode
from graphllm.ops.attention.paged_attention.triton_prefill import prefill_configs
from graphllm.ops.attention.paged_attention.triton_prefill import triton_prefill as prefill
from graphllm.ops.attention.paged_attention.triton_range_kernel import in_ranges, range_order
from graphllm.ops.attention.paged_attention.triton_ranges import range_configs
from graphllm.ops.attention.paged_attention.triton_ranges import triton_ranges as ranges
from graphllm.ops.attention.paged_attention.triton_verify import is_mixed, is_verification, verify_configs
from graphllm.ops.attention.paged_attention.triton_verify import triton_verify as verify
from graphllm.ops.attention.rope_attention.op import rope_attention


def _rotates(site: CallSite) -> bool:
    tables = [site.args[name] for name in ("cos_TF", "sin_TF")]
    norms = [n for n in (site.args["q_norm_E"], site.args["k_norm_E"]) if n is not None]
    same = all(n.dtype == site.args["q_THE"].dtype for n in norms)
    return same and all(t.dtype == torch.float32 and t.is_contiguous() for t in tables)


@rope_attention.impl(
    "triton_decode",
    device="cuda",
    supports=lambda s: is_decode(s) and _rotates(s),
    configs=decode_configs,
    remedy=problem,
)
def triton_decode(
    *, cos_TF: Tensor, sin_TF: Tensor, q_norm_E: Tensor | None, k_norm_E: Tensor | None, eps: float, **attention: Any
) -> Tensor:
    """Pure decode: every sequence has zero or one query token."""
    return decode(rotary=Rotary(cos_TF, sin_TF, q_norm_E, k_norm_E, eps), **attention)


def _rotates_halves(site: CallSite) -> bool:
    """Whether all of a head rotates, and its entries lie side by side in memory: what kernels in Gluon ask."""
    norm = site.args["q_norm_E"]
    return (
        _rotates(site)
        and 2 * site.args["cos_TF"].shape[1] == site.args["q_THE"].shape[2]
        and (norm is None or norm.is_contiguous())
    )


def _by_gluon(site: CallSite) -> bool:
    return is_flash(site) and _rotates_halves(site)


@rope_attention.impl("gluon_prefill", device="cuda", supports=_by_gluon, configs=flash_configs, remedy=problem)
def gluon_prefill(
    *, cos_TF: Tensor, sin_TF: Tensor, q_norm_E: Tensor | None, k_norm_E: Tensor | None, eps: float, **attention: Any
) -> Tensor:
    """Any ragged batch, on Hopper."""
    return hopper_prefill(rotary=Rotary(cos_TF, sin_TF, q_norm_E, k_norm_E, eps), **attention)


@rope_attention.impl(
    "triton_prefill", device="cuda", supports=lambda s: is_mixed(s) and _rotates(s) and not _by_gluon(s),
    configs=prefill_configs, remedy=problem,
)  # fmt: skip
def triton_prefill(
    *, cos_TF: Tensor, sin_TF: Tensor, q_norm_E: Tensor | None, k_norm_E: Tensor | None, eps: float, **attention: Any
) -> Tensor:
    """Any ragged batch that `gluon_prefill` does not take, which is 1.25 times as fast and spares 10 s of compiling."""
    return prefill(rotary=Rotary(cos_TF, sin_TF, q_norm_E, k_norm_E, eps), **attention)


@rope_attention.impl(
    "triton_verify", device="cuda", supports=lambda s: is_verification(s) and _rotates(s), configs=verify_configs,
    remedy=problem,
)  # fmt: skip
def triton_verify(
    *, cos_TF: Tensor, sin_TF: Tensor, q_norm_E: Tensor | None, k_norm_E: Tensor | None, eps: float, **attention: Any
) -> Tensor:
    """Every sequence has a few query tokens."""
    return verify(rotary=Rotary(cos_TF, sin_TF, q_norm_E, k_norm_E, eps), **attention)


@rope_attention.impl(
    "gluon_ranges", device="cuda", supports=lambda s: in_flash_ranges(s) and _rotates_halves(s),
    configs=flash_range_configs, row_order=range_order, remedy=problem,
)  # fmt: skip
def gluon_ranges(
    *, cos_TF: Tensor, sin_TF: Tensor, q_norm_E: Tensor | None, k_norm_E: Tensor | None, eps: float, **attention: Any
) -> Tensor:
    """Any ragged batch on Hopper, each row as if alone."""
    return hopper_ranges(rotary=Rotary(cos_TF, sin_TF, q_norm_E, k_norm_E, eps), **attention)


@rope_attention.impl(
    "triton_ranges", device="cuda", supports=lambda s: in_ranges(s) and _rotates(s), configs=range_configs,
    row_order=range_order, remedy=problem,
)  # fmt: skip
def triton_ranges(
    *, cos_TF: Tensor, sin_TF: Tensor, q_norm_E: Tensor | None, k_norm_E: Tensor | None, eps: float, **attention: Any
) -> Tensor:
    """Any ragged batch, each row as if alone."""
    return ranges(rotary=Rotary(cos_TF, sin_TF, q_norm_E, k_norm_E, eps), **attention)
