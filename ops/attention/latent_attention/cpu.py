"""latent_attention on the CPU: over latents for few tokens of a sequence, over keys and values made of them for many.

bfloat16 or float32, with a cache of the same or of 8 bits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.op import CallSite, by_site, each_alone
from graphllm.ops.attention.cpu_kernels import kernels_of
from graphllm.ops.attention.latent_attention.op import latent_attention
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections

_SCHEMA = (
    "(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor k_up, Tensor v_up, Tensor(a!) latent_cache,"
    " Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor(b!) out, Tensor? ancestors, SymInt T,"
    " SymInt S, SymInt H, SymInt N, SymInt R, SymInt L, SymInt V, SymInt P, SymInt nope_token, SymInt nope_head,"
    " SymInt rope_token, SymInt rope_head, SymInt latent_token, SymInt k_rope_token, SymInt k_up_head, SymInt k_up_row,"
    " SymInt v_up_head, SymInt v_up_row, SymInt cache_block, SymInt cache_slot, SymInt table_stride, float scale,"
    " bool invariant) -> ()"
)
_kernels = kernels_of("latent_attention", _SCHEMA, Path(__file__).parent)


def _supports(site: CallSite) -> bool:
    rows = (*site.struct(LatentRows), *site.struct(UpProjections))
    paged = cache, *tables = site.struct(PagedLatents)
    return (
        (rows[0].dtype, cache.dtype) in _kernels
        and all(t.dtype == rows[0].dtype for t in rows)
        and all(t.dtype == torch.int32 for t in tables)
        and all(t.stride(-1) == 1 for t in (*rows, *paged))
    )


def remedy(site: CallSite) -> str:
    """What a user can do about dtypes that no kernel over latents takes."""
    dtype = str(site.args["latent_TL"].dtype).removeprefix("torch.")
    return f"dtype {dtype}: no attention over latents for a CPU takes it; use bfloat16 or float32"


@latent_attention.impl("cpu", device="cpu", supports=_supports, configs=by_site, row_order=each_alone, remedy=remedy)
def cpu_latent_attention(
    rows: LatentRows,
    up: UpProjections,
    paged: PagedLatents,
    scale: float,
    ancestors_T: Tensor | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """Online softmax over chunks of the cache, of queries in latent space or of keys and values of heads.

    With AMX or AVX-512, products are of bfloat16, and weights of the softmax and numbers of a cache in 8 bits are
    rounded to it.
    """
    (q_nope_THN, q_rope_THR, latent_TL, k_rope_TR), (k_up_HNL, v_up_HVL) = rows, up
    (T, H, N), R, L, V = q_nope_THN.shape, q_rope_THR.shape[2], latent_TL.shape[1], v_up_HVL.shape[1]
    cache, block_table = paged.latent_cache, paged.block_table
    out_THV = q_nope_THN.new_empty(T, H, V)
    _kernels[latent_TL.dtype, cache.dtype](
        *(*rows, *up, *paged, out_THV, ancestors_T, T, paged.seq_lens.shape[0], H, N, R, L, V, cache.shape[1]),
        *(*q_nope_THN.stride()[:2], *q_rope_THR.stride()[:2], latent_TL.stride(0), k_rope_TR.stride(0)),
        *(*k_up_HNL.stride()[:2], *v_up_HVL.stride()[:2], *cache.stride()[:2], block_table.stride(0), scale, invariant),
    )
    return out_THV
