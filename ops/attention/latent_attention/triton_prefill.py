"""Steps with prompts on any GPU, see `prompts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.latent_attention.op import latent_attention
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.prompts import attend, is_mixed, step_constants
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.latent_attention.triton_flash import flash


def _configs(site: CallSite) -> list[dict[str, Any]]:
    """Launch constants, the likely best first."""
    single = site.args["q_nope_THN"].dtype == torch.float32
    tiles = [(16, 16, 4, 2)] if single else [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)]
    return [
        {**step_constants(site), "block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
        for block_m, block_n, warps, stages in tiles
    ]


@latent_attention.impl("triton_prefill", device="cuda", supports=is_mixed, configs=_configs, remedy=problem)
def triton_prefill(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, ancestors_T: Tensor | None, **config: Any
) -> Tensor:
    """Any ragged batch."""
    return attend(rows, up, paged, scale, ancestors_T, flash, **config)
