"""What steps with prompts start for their sequences of a single token: the fastest kernel of decode that takes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.latent_attention.decode import gluon_decode, triton_decode
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_absorb import Config, attend_absorbed


def plan_decode(site: CallSite, most: int, queries: int) -> Config:
    """Launch constants of `launch_decode` for up to ``most`` sequences of up to ``queries`` query tokens."""
    wide = gluon_decode.is_wide(site)
    plan = gluon_decode.plan_wide if wide else triton_decode.plan_decode
    return {**plan(site, most, queries), "wide": wide}


def launch_decode(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, out_THV: Tensor, scale: float, *, write: bool,
    wide: bool, **config: Any,
) -> None:  # fmt: skip
    """Attend for the sequences that have one to ``queries`` query tokens; the others are not touched. write: see
    `attend_absorbed`."""
    attend = gluon_decode.launch_attention if wide else triton_decode.launch_attention
    attend_absorbed(attend, rows, up, paged, out_THV, scale, write=write, **config)
