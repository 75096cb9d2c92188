"""paged_attention: write this step's keys and values into the paged cache, then attend, for one ragged batch."""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor

from graphllm.ir import Cost, StateSpec, nbytes, op
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows, Scores
from graphllm.ops.attention.rope import rope
from graphllm.ops.norms.rms_norm import rms_norm

_E4M3_MOST = 448.0


def _cost(rows: Rows, paged: Paged, window: int, rotary: Rotary | None) -> Cost:
    (q_THE, k_TKE, v_TKE), (kv_cache, _, query_start_loc, seq_lens) = rows, paged
    H, E = q_THE.shape[1:]
    K = k_TKE.shape[1]
    queries = (query_start_loc[1:] - query_start_loc[:-1]).tolist()
    pairs = read = 0
    for n, length in zip(queries, seq_lens.tolist(), strict=True):
        if n == 0:
            continue
        spans = [min(p + 1, window) if window else p + 1 for p in range(length - n, length)]
        pairs += sum(spans)
        read += min(length, window + n - 1) if window else length
    token = 2 * K * kv_cache.shape[4] * kv_cache.element_size()
    cache = (read + k_TKE.shape[0]) * token
    read = cache + 2 * nbytes(q_THE) + nbytes(k_TKE, v_TKE)
    flops = 4 * H * E * pairs
    if rotary is not None:
        *tables, _ = rotary
        read += nbytes(*tables)
        flops += (q_THE.numel() + k_TKE.numel()) * (6 if rotary.q_norm_E is None else 10)
    return Cost(read, flops)


def kv_state(K: int, E: int, window: int = 0) -> StateSpec:
    """The cache of one layer: keys and values of K heads of E numbers, of all tokens or of the last ``window``."""
    return StateSpec("kv", "block", (2, K, "P", E), "cache", "window" if window else "full", window)


def entries_of(kv_cache: Tensor, E: int) -> tuple[Tensor, Tensor | None]:
    """Views of a cache: its entries [B, 2, K, P, E] and, of an int8 one, the scales [B, 2, K, P] after the entries of a
    head."""
    if kv_cache.dtype != torch.int8:
        return kv_cache, None
    P = kv_cache.shape[3]
    heads = kv_cache.view(*kv_cache.shape[:3], -1)
    return heads[..., : P * E].unflatten(3, (P, E)), heads[..., P * E :].view(torch.float32)


def store(kv_cache: Tensor, kind: int, block: Tensor, slot: Tensor, rows_TKE: Tensor, scale: Tensor | None) -> None:
    """Write keys (kind 0) or values (1) of tokens into slots of blocks, rounded to the cache's dtype."""
    entries, scales = entries_of(kv_cache, rows_TKE.shape[2])
    if scales is not None:
        rows_TKE = rows_TKE.float()
        step = rows_TKE.abs().amax(-1) / 127
        scales[block, kind, :, slot] = step
        rows_TKE = torch.where(step[..., None] > 0, rows_TKE / step[..., None], 0).round()
    elif kv_cache.dtype == torch.float8_e4m3fn:
        rows_TKE = rows_TKE.float() if scale is None else rows_TKE.float() / scale
        rows_TKE = rows_TKE.clamp(-_E4M3_MOST, _E4M3_MOST)
    entries[block, kind, :, slot] = rows_TKE.to(kv_cache.dtype)


def _load(kv_cache: Tensor, kind: int, blocks: Tensor, E: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values [B, K, P, E] of blocks, as numbers."""
    entries, scales = entries_of(kv_cache, E)
    found = entries[blocks, kind].to(dtype)
    if scales is not None:
        return found * scales[blocks, kind][..., None].to(dtype)
    return found if scale is None else found * scale.to(dtype)


def seen_of_step(bits_n: Tensor | None, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of its step's n rows each row of a sequence sees [n, n], and how many positions after the first one it
    stands [n]."""
    row = torch.arange(n, device=device)
    causal = row[None, :] <= row[:, None]
    if bits_n is None:
        return causal, row
    bits = (bits_n[:, None] >> row) & 1 > 0
    return torch.where(bits_n[:, None] < 0, causal, bits), torch.where(bits_n < 0, row, bits.sum(1) - 1)


@op(boundary=True, mutates=("kv_cache",), cost=_cost)
def paged_attention(
    rows: Rows,
    paged: Paged,
    scores: Scores,
    kv_scales: Tensor | None = None,
    ancestors_T: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """Causal attention of T new tokens over a paged KV cache, grouped-query heads, one ragged batch.

    Row i of a sequence's n rows has position seq_lens - n + i. What no row sees of the cache may be NaN.
    A cache of q's dtype holds keys and values as they are. One of float8_e4m3fn holds them divided by kv_scales,
    float32 [2] for keys and values (None: 1), rounded to the nearest, even in a tie, and no larger than 448. One of
    int8, [B, 2, K, P, E + 4], holds of each head P * E numbers, then P float32 scales: that of a token and head is its
    largest magnitude / 127. Quotients are float32. All tokens, the step's own too, are read as entry times scale; what
    is read of an entry that is NaN is not specified.
    ancestors_T [T] int64 (None: -1 throughout): -1 for a row that sees what was said above. The rows of other
    sequences, at most 63, are nodes of a tree of drafts, or of a block in which all see each other: such a row sees all
    of the cache before the step's rows, and row j of its own step where bit j is set, as its own one is. It stands as
    many positions after the first row as it has bits more than one, and a window counts by these. Rows lie in the cache
    as they do without.
    rotary: queries and keys are first normalized and rotated by it. An implementation may keep float32 within the
    rotation; the reference rounds to q's dtype after each product.
    Returns [T, H, E] in q's dtype; rows at or after query_start_loc[S] are padding and come back unspecified.
    Softmax and products accumulate in float32. Source: Vaswani et al. 2017; Kwon et al. 2023 (paging); Ainslie et al.
    2023 (grouped queries); Gemma 2 report 2024 (soft cap); OpenAI 2025, gpt-oss (sinks); Miao et al. 2024, SpecInfer
    (trees).
    """
    q_THE, k_TKE, v_TKE = rows
    if rotary is not None:
        if rotary.q_norm_E is not None and rotary.k_norm_E is not None:
            q_THE = rms_norm.reference(q_THE, rotary.q_norm_E, rotary.eps)
            k_TKE = rms_norm.reference(k_TKE, rotary.k_norm_E, rotary.eps)
        q_THE, k_TKE = (rope.reference(x, rotary.cos_TF, rotary.sin_TF) for x in (q_THE, k_TKE))
    kv_cache, block_table, query_start_loc, seq_lens = paged
    scale, window, softcap, sinks_H = scores
    H, E = q_THE.shape[1:]
    K, P = kv_cache.shape[2], kv_cache.shape[3]
    out_THE = torch.zeros_like(q_THE, memory_format=torch.contiguous_format)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    accumulate = torch.float64 if q_THE.dtype == torch.float64 else torch.float32
    scales = (None, None) if kv_scales is None else kv_scales.unbind()
    for s, length in enumerate(lengths):
        a, b = starts[s], starts[s + 1]
        if a == b:
            continue
        positions = torch.arange(length - (b - a), length, device=q_THE.device)
        block = block_table[s, positions // P].long()
        for kind, entries in enumerate((k_TKE, v_TKE)):
            store(kv_cache, kind, block, positions % P, entries[a:b], scales[kind])
        blocks = block_table[s, : -(-length // P)].long()
        keys, values = (
            repeat(_load(kv_cache, i, blocks, E, scales[i], accumulate), "b k p e -> (b p) (k g) e", g=H // K)[:length]
            for i in (0, 1)
        )
        logits = torch.einsum("the,lhe->htl", q_THE[a:b].to(accumulate), keys) * scale
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        seen, depths = seen_of_step(None if ancestors_T is None else ancestors_T[a:b], b - a, q_THE.device)
        before = torch.arange(length - (b - a), device=q_THE.device)
        visible = torch.cat([seen.new_ones(b - a, len(before)), seen], dim=1)
        if window > 0:
            standing = torch.cat([before, length - (b - a) + depths])
            visible &= standing[None, :] > standing[len(before) :, None] - window
        values = values.masked_fill(~visible.any(0)[:, None, None], 0)  # 0 * NaN is NaN
        logits = logits.masked_fill(~visible, float("-inf"))
        if sinks_H is not None:
            logits = torch.cat([logits, sinks_H.to(accumulate)[:, None, None].expand(-1, b - a, 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :length]
        out_THE[a:b] = torch.einsum("htl,lhe->the", weights, values).to(q_THE.dtype)
    return out_THE


@paged_attention.fake
def _(q_THE: Tensor) -> Tensor:
    return torch.empty_like(q_THE, memory_format=torch.contiguous_format)
