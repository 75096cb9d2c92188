"""latent_attention: attention whose cache holds one latent a token, of which keys and values of all heads are made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.ir import Cost, StateSpec, nbytes, op
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.paged_attention.op import seen_of_step
from graphllm.program.specs import LATENT_GROUP

_MOST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def _cost(rows: LatentRows, up: UpProjections, paged: PagedLatents) -> Cost:
    """Of each sequence the cheaper form: keys and values made of latents, or queries and results brought to them."""
    (T, _, R), (H, N, L), V = rows.q_rope_THR.shape, up.k_up_HNL.shape, up.v_up_HVL.shape[1]
    cache, _, query_start_loc, seq_lens = paged
    queries = (query_start_loc[1:] - query_start_loc[:-1]).tolist()
    flops = read = 0
    for n, length in zip(queries, seq_lens.tolist(), strict=True):
        if n > 0:
            pairs = sum(range(length - n + 1, length + 1))
            expanded = length * L * (N + V) + pairs * (N + R + V)
            absorbed = n * L * (N + V) + pairs * (2 * L + R)
            flops += 2 * H * min(expanded, absorbed)
            read += length + n
    cached = read * cache.shape[2] * cache.element_size()
    return Cost(cached + nbytes(*rows, *up) + T * H * V * rows.q_rope_THR.element_size(), flops)


def latent_state(L: int, R: int) -> StateSpec:
    """The cache of one layer: of each token a latent of L numbers and R rotated numbers of its key."""
    return StateSpec("latent", "block", ("P", L + R), "cache", plain=R)


class Entries(NamedTuple):
    """Views of a cache.

    latents: [B, P, L].
    scales: float32 factors of groups of numbers of a latent, [B, P, groups]; None in a cache of the model's dtype.
    k_rope: [B, P, R].
    """

    latents: Tensor
    scales: Tensor | None
    k_rope: Tensor


def entries_of(latent_cache: Tensor, L: int) -> Entries:
    """A row has the latent's numbers, then the rotated ones. In 8 bits, the scales lie between, and the rotated numbers
    are bfloat16."""
    if latent_cache.dtype not in _MOST:
        return Entries(latent_cache[..., :L], None, latent_cache[..., L:])
    end = L + 4 * -(-L // LATENT_GROUP)
    scales, k_rope = latent_cache[..., L:end], latent_cache[..., end:]
    return Entries(latent_cache[..., :L], scales.view(torch.float32), k_rope.view(torch.bfloat16))


def store(latent_cache: Tensor, block: Tensor, slot: Tensor, latent_TL: Tensor, k_rope_TR: Tensor) -> None:
    """Write tokens into slots of blocks, rounded to the cache's dtype."""
    latents, scales, k_rope = entries_of(latent_cache, latent_TL.shape[1])
    k_rope[block, slot] = k_rope_TR.to(k_rope.dtype)
    if scales is None:
        latents[block, slot] = latent_TL.to(latents.dtype)
        return
    for g, part in enumerate(latent_TL.float().split(LATENT_GROUP, 1)):
        step = part.abs().amax(1) / _MOST[latents.dtype]
        part = torch.where(step[:, None] > 0, part / step[:, None], 0)
        if latents.dtype == torch.int8:
            part = part.round()
        first = g * LATENT_GROUP
        latents[block, slot, first : first + part.shape[1]] = part.to(latents.dtype)
        scales[block, slot, g] = step


def load(latent_cache: Tensor, blocks: Tensor, L: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latents [n * P, L] and rotated parts of keys [n * P, R] of n blocks, as numbers."""
    latents, scales, k_rope = entries_of(latent_cache, L)
    found = latents[blocks].to(dtype)
    if scales is not None:
        found = found * scales[blocks].to(dtype).repeat_interleave(LATENT_GROUP, -1)[..., :L]
    return found.flatten(0, 1), k_rope[blocks].to(dtype).flatten(0, 1)


@op(boundary=True, mutates=("latent_cache",), cost=_cost)
def latent_attention(
    rows: LatentRows,
    up: UpProjections,
    paged: PagedLatents,
    scale: float,
    ancestors_T: Tensor | None = None,
) -> Tensor:
    """Causal attention of T new tokens over a paged cache of latents, one ragged batch.

    Of each token the cache holds a latent c [L] and the rotated part of its key. Head h has the key of k_up_HNL[h] c,
    followed by the rotated part, and the value v_up_HVL[h] c. Row i of a sequence's n rows has position
    seq_lens - n + i. What no row sees of the cache may be NaN.

    A cache of the rows' dtype holds [c, rotated part]. One of float8_e4m3fn or int8 holds the numbers of c divided by a
    float32 scale for each 128 of them, the largest magnitude / 448 or / 127, rounded to the nearest; then the scales;
    then the rotated part in bfloat16. All tokens, the step's own too, are read as they are in the cache.
    scale: factor of q.k.
    ancestors_T: trees of drafts, as of `paged_attention`.
    Returns [T, H, V] in q's dtype; rows at or after query_start_loc[S] are padding and come back unspecified.
    All is computed in float32. An implementation may round keys and values to q's dtype, or instead queries in latent
    space, k_up_HNL[h]^T q, and weighted sums of latents. Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1.
    """
    (q_nope_THN, q_rope_THR, latent_TL, k_rope_TR), (k_up_HNL, v_up_HVL) = rows, up
    latent_cache, block_table, query_start_loc, seq_lens = paged
    (T, H, _), L, P = q_nope_THN.shape, latent_TL.shape[1], latent_cache.shape[1]
    out_THV = q_nope_THN.new_zeros(T, H, v_up_HVL.shape[1])
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    exact = torch.promote_types(q_nope_THN.dtype, torch.float32)
    q_nope, q_rope, k_up, v_up = (x.to(exact) for x in (q_nope_THN, q_rope_THR, k_up_HNL, v_up_HVL))
    for s, length in enumerate(lengths):
        a, b = starts[s], starts[s + 1]
        if a == b:
            continue
        positions = torch.arange(length - (b - a), length, device=q_nope.device)
        store(latent_cache, block_table[s, positions // P].long(), positions % P, latent_TL[a:b], k_rope_TR[a:b])
        latents, k_rope = (x[:length] for x in load(latent_cache, block_table[s, : -(-length // P)].long(), L, exact))
        keys = torch.einsum("nl,hkl->hnk", latents, k_up)
        logits = torch.einsum("thk,hnk->htn", q_nope[a:b], keys) + torch.einsum("thr,nr->htn", q_rope[a:b], k_rope)
        seen, _ = seen_of_step(None if ancestors_T is None else ancestors_T[a:b], b - a, q_nope.device)
        visible = torch.cat([seen.new_ones(b - a, length - (b - a)), seen], dim=1)
        weights = torch.softmax((logits * scale).masked_fill(~visible, float("-inf")), dim=-1)
        values = torch.einsum("nl,hvl->hnv", latents, v_up)
        out_THV[a:b] = torch.einsum("htn,hnv->thv", weights, values).to(out_THV.dtype)
    return out_THV


@latent_attention.fake
def result_of(
    q_nope_THN: Tensor, q_rope_THR: Tensor, latent_TL: Tensor, k_rope_TR: Tensor, up: UpProjections
) -> Tensor:
    """Room for the result of attention over latents, [T, H, V]. Raises RuntimeError for sizes that do not fit."""
    (T, H, N), V, L = q_nope_THN.shape, up.v_up_HVL.shape[1], latent_TL.shape[1]
    torch._check(up.k_up_HNL.shape == (H, N, L), lambda: f"k_up_HNL is {up.k_up_HNL.shape} for {H} heads of {N}")
    torch._check(up.v_up_HVL.shape == (H, V, L), lambda: f"v_up_HVL is {up.v_up_HVL.shape} for {H} heads")
    torch._check(q_rope_THR.shape[2] == k_rope_TR.shape[1], lambda: "queries and keys rotate different numbers")
    return q_nope_THN.new_empty(T, H, V)
