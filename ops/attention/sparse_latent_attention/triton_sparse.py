"""sparse_latent_attention on GPUs: queries go to latent space, attend to chosen rows there, and results come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.paged_attention.triton_common import power_of_2
from graphllm.ops.attention.sparse_latent_attention.op import sparse_latent_attention
from graphllm.ops.attention.sparse_latent_attention.triton_around import to_latent, write_slots, write_values
from graphllm.ops.attention.sparse_latent_attention.triton_chosen import attend_chosen

Config = Mapping[str, Any]
_MOST_SHARES, _LEAST_ROWS = 16, 64  # of a token's rows, and of a share


def plan(site: CallSite) -> Config:
    """Launch constants of `attend_sparse`. Few tokens have their rows divided among programs, until all processors have
    one."""
    q, L, V = site.args["q_nope_THN"], site.args["latent_TL"].shape[1], site.args["v_up_HVL"].shape[1]
    rows, wide, H = max(1, site.rows("q_nope_THN")), q.dtype == torch.float32, q.shape[1]
    block_m = min(16 if wide else 64, power_of_2(H))
    shares, most = 1, min(_MOST_SHARES, site.args["chosen_TK"].shape[1] // _LEAST_ROWS)
    while 2 * shares * rows * -(-H // block_m) <= site.target.multiprocessors and 2 * shares <= most:
        shares *= 2
    tokens = 16 if rows <= 16 else 32 if rows <= 32 or wide else 64
    narrow = block_m < 64 or site.args["latent_cache"].dtype == torch.float8_e4m3fn
    return {
        "shares": shares,
        "attend": {
            "block_m": block_m, "block_n": 16 if wide else 32 if narrow else 64, "warps": 4 if block_m < 64 else 8,
            "stages": 1 if wide else 3 if narrow else 2,
        },
        "absorb": {"block_m": tokens, "block_l": min(64 if wide else 128, power_of_2(L))},
        "values": {
            "block_m": tokens, "block_v": min(64 if wide else 128, power_of_2(V)),
            "block_l": min(128 if tokens <= 32 and not wide else 64, power_of_2(L)),
        },
    }  # fmt: skip


def attend_sparse(
    attend_chosen: Callable[..., None], rows: LatentRows, up: UpProjections, paged: PagedLatents, chosen_TK: Tensor,
    scale: float, *, shares: int, attend: Mapping[str, int], absorb: Mapping[str, int], values: Mapping[str, int],
) -> Tensor:  # fmt: skip
    """The whole step. attend_chosen: attends in latent space, as that of `triton_chosen`, with constants ``attend``."""
    (T, H, _), (L, V) = rows.q_nope_THN.shape, (rows.latent_TL.shape[1], up.v_up_HVL.shape[1])
    slots, counts = write_slots(rows, paged, chosen_TK)
    absorbed = to_latent(rows.q_nope_THN, up.k_up_HNL, **absorb)
    parts = absorbed.new_empty(T, shares, H, L)
    lse = torch.empty((T, shares, H), dtype=torch.float32, device=absorbed.device)
    attend_chosen(absorbed, rows.q_rope_THR, paged, slots, counts, parts, lse, scale, **attend)
    out_THV = absorbed.new_empty(T, H, V)
    write_values(parts, lse, up.v_up_HVL, out_THV, **values)
    return out_THV


@sparse_latent_attention.impl(
    "triton_sparse", device="cuda", supports=lambda site: not problem(site), configs=lambda site: [plan(site)],
    remedy=problem,
)  # fmt: skip
def triton_sparse(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, chosen_TK: Tensor, scale: float, **config: Any
) -> Tensor:
    """Decode and prompts alike."""
    return attend_sparse(attend_chosen, rows, up, paged, chosen_TK, scale, **config)
