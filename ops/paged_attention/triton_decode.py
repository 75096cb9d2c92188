"""Triton kernels for steps in which a sequence has at most one query token: split-KV decode with packed query groups.

One program attends for one sequence, one KV head (all of its query heads packed into the rows of a tile) and one range
of the context. The number of ranges is a launch constant; the ranges follow from seq_len on the device, so a captured
launch serves every length. The step's own token is taken from k and v directly, by the program of range 0, which also
stores it into the cache: no program reads a position that another one writes. A second kernel joins the ranges.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM108  (a branch on a constexpr is not a conditional expression)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import Site, launch_triton
from graphllm.ops.paged_attention.op import paged_attention


@triton.jit
def split_bounds(length, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr):
    """What decode reads of the cache (not the new token): first position, first tile, tiles, tiles per range."""
    last = length - 1
    start = last * 0
    if WINDOW > 0:
        start = tl.maximum(length - WINDOW, 0)
    first = start // BLOCK_N
    tiles = tl.where(last > start, (last + BLOCK_N - 1) // BLOCK_N - first, 0)
    per_split = tl.maximum((tiles + SPLITS - 1) // SPLITS, MIN_TILES)
    return start, first, tiles, per_split


@triton.jit
def soft_cap(scores, LOG2E_CAP: tl.constexpr, SCORE_SCALE: tl.constexpr):
    """LOG2E_CAP * tanh(scores * SCORE_SCALE), with an exponential that cannot overflow."""
    t = tl.exp2(tl.abs(scores) * (SCORE_SCALE * -2.8853900817779268))
    capped = LOG2E_CAP * (1 - t) / (1 + t)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def tile_pages(table_row, tile, end, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each position of a tile, 0 from position end on.

    Loops read the next tile's pages one iteration ahead: Triton's pipeliner then keeps several tiles of keys in flight,
    while keys that depend on a load of the same iteration would be fetched one tile at a time.
    """
    n = tl.arange(0, BLOCK_N)
    at = tile * BLOCK_N + n
    if P <= BLOCK_N:
        return tl.load(table_row + (tile * (BLOCK_N // P) + n // P), mask=at < end, other=0)
    else:
        return tl.load(table_row + at // P, mask=at < end, other=0)


@triton.jit
def tile_slots(page, tile, CACHE_PAGE: tl.constexpr, CACHE_POS: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of a tile's positions in one head of the cache."""
    n = tl.arange(0, BLOCK_N)
    if P > BLOCK_N:
        n = (tile * BLOCK_N) % P + n
    return page.to(tl.int64) * CACHE_PAGE + (n % P) * CACHE_POS


@triton.jit
def multiply(a, b, acc, EMULATED: tl.constexpr):
    """acc + a @ b in float32. Triton's interpreter (EMULATED) cannot multiply bfloat16."""
    if EMULATED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    query_start_ptr,
    seq_len_ptr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    CACHE_PAGE: tl.constexpr,
    CACHE_KV: tl.constexpr,
    CACHE_HEAD: tl.constexpr,
    CACHE_POS: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e) without a soft cap, divided by the cap with one
    LOG2E_CAP: tl.constexpr,  # soft cap times log2(e); 0 is off
    WINDOW: tl.constexpr,
    WRITE: tl.constexpr,  # store k and v into the cache (else the cache holds them already)
    H: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    P: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EMULATED: tl.constexpr,
):
    split = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    row = tl.load(query_start_ptr + s)
    queries = tl.load(query_start_ptr + s + 1) - row
    length = tl.load(seq_len_ptr + s)
    start, first, tiles, per_split = split_bounds(length, WINDOW, BLOCK_N, SPLITS, MIN_TILES)
    lo = first + split * per_split
    hi = tl.minimum(lo + per_split, first + tiles)
    if (queries == 1) & ((split == 0) | (lo < hi)):
        last = length - 1
        g = tl.arange(0, G_PAD)
        e = tl.arange(0, E_PAD)
        n = tl.arange(0, BLOCK_N)
        row64 = row.to(tl.int64)
        in_e = e < E
        in_q = (g < G)[:, None] & in_e[None, :]
        q = tl.load(q_ptr + row64 * Q_ROW + (head * G + g[:, None]) * Q_HEAD + e[None, :], mask=in_q, other=0.0)
        k_new = tl.load(k_ptr + row64 * K_ROW + head * K_HEAD + e, mask=in_e, other=0.0)
        v_new = tl.load(v_ptr + row64 * V_ROW + head * V_HEAD + e, mask=in_e, other=0.0)
        table_row = table_ptr + s.to(tl.int64) * TABLE_ROW
        head_ptr = cache_ptr + head * CACHE_HEAD

        own = split == 0
        if WRITE:
            last_page = tl.load(table_row + last // P).to(tl.int64)
            own_e = e < tl.where(own, E, 0)
            slot = head_ptr + last_page * CACHE_PAGE + (last % P) * CACHE_POS + e
            tl.store(slot, k_new, mask=own_e)
            tl.store(slot + CACHE_KV, v_new, mask=own_e)

        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1)
        if LOG2E_CAP > 0:
            score = soft_cap(score, LOG2E_CAP, SCALE)
        else:
            score = score * SCALE
        top = tl.where(own, score, float("-inf"))
        total = tl.where(own, 1.0, 0.0) + tl.zeros([G_PAD], tl.float32)
        acc = tl.where(own, v_new.to(tl.float32), 0.0)[None, :] + tl.zeros([G_PAD, E_PAD], tl.float32)

        page = tile_pages(table_row, lo, last, P, BLOCK_N)
        for tile in range(lo, hi):
            at = tile * BLOCK_N + n
            seen = at < last
            if WINDOW > 0:
                seen = seen & (at >= start)
            slots = head_ptr + tile_slots(page, tile, CACHE_PAGE, CACHE_POS, P, BLOCK_N)[:, None] + e[None, :]
            if E_PAD == E:
                inside = seen[:, None]
            else:
                inside = seen[:, None] & in_e[None, :]
            keys = tl.load(slots, mask=inside, other=0.0)
            values = tl.load(slots + CACHE_KV, mask=inside, other=0.0)
            page = tile_pages(table_row, tile + 1, last, P, BLOCK_N)
            scores = multiply(q, tl.trans(keys), tl.zeros([G_PAD, BLOCK_N], tl.float32), EMULATED)
            if LOG2E_CAP > 0:
                scores = soft_cap(scores, LOG2E_CAP, SCALE)
            else:
                scores = scores * SCALE
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            rescale = tl.exp2(top - new_top)
            p = tl.exp2(scores - new_top[:, None])
            total = total * rescale + tl.sum(p, axis=1)
            acc = multiply(p.to(values.dtype), values, acc * rescale[:, None], EMULATED)
            top = new_top

        acc = acc / total[:, None]
        heads = head * G + g
        if tiles <= per_split:
            out = out_ptr + (row64 * H + heads)[:, None] * E + e[None, :]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_q)
        else:
            at_split = (s.to(tl.int64) * SPLITS + split) * H + heads
            tl.store(partial_ptr + at_split[:, None] * E + e[None, :], acc, mask=in_q)
            tl.store(lse_ptr + at_split, top + tl.log2(total), mask=g < G)


@triton.jit
def _join_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_start_ptr,
    seq_len_ptr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(query_start_ptr + s)
    queries = tl.load(query_start_ptr + s + 1) - row
    _, _, tiles, per_split = split_bounds(tl.load(seq_len_ptr + s), WINDOW, BLOCK_N, SPLITS, MIN_TILES)
    if (queries == 1) & (tiles > per_split):
        e = tl.arange(0, E_PAD)
        split = tl.arange(0, SPLITS_PAD)
        used = split < (tiles + per_split - 1) // per_split
        at = (s.to(tl.int64) * SPLITS + split) * H + head
        lse = tl.load(lse_ptr + at, mask=used, other=float("-inf"))
        weight = tl.exp2(lse - tl.max(lse, axis=0))
        inside = used[:, None] & (e < E)[None, :]
        parts = tl.load(partial_ptr + at[:, None] * E + e[None, :], mask=inside, other=0.0)
        joined = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
        out = out_ptr + (row.to(tl.int64) * H + head) * E + e
        tl.store(out, joined.to(out_ptr.dtype.element_ty), mask=e < E)


def score_constants(scale: float, softcap: float) -> tuple[float, float]:
    """The kernels' SCALE and LOG2E_CAP: scores are kept in units of log2."""
    if softcap > 0:
        return scale / softcap, softcap * math.log2(math.e)
    return scale * math.log2(math.e), 0.0


def power_of_2(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n and ``least``: the padded size of a tile's dimension."""
    return max(least, 1 << (n - 1).bit_length())


def attends(site: Site) -> bool:
    """Whether the kernels of this folder compute the op at a site: its dtype, head size and page size."""
    q, cache, table = site.args["q_THE"], site.args["kv_cache"], site.args["block_table"]
    same = all(site.args[n].dtype == q.dtype for n in ("k_TKE", "v_TKE", "kv_cache"))
    P, E = cache.shape[3], cache.shape[4]
    half = q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return same and half and E <= 256 and P % 16 == 0 and P & (P - 1) == 0 and table.dtype == torch.int32


def launch_decode(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    out_THE: Tensor,
    scale: float,
    window: int,
    softcap: float,
    *,
    write: bool,
    splits: int,
    min_tiles: int,
    block_n: int,
    warps: int,
    stages: int,
) -> None:
    """Attend for the sequences of the batch that have exactly one query token; the others are left alone."""
    H, E = q_THE.shape[1:]
    K, P = kv_cache.shape[2], kv_cache.shape[3]
    S = seq_len.shape[0]
    shape = (S, splits, H) if splits > 1 else (1, 1, 1)
    partial = torch.empty((*shape, E), dtype=torch.float32, device=q_THE.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q_THE.device)
    score_scale, log2e_cap = score_constants(scale, softcap)
    shared = {
        "WINDOW": window, "H": H, "E": E, "E_PAD": power_of_2(E),
        "SPLITS": splits, "MIN_TILES": min_tiles, "BLOCK_N": block_n,
    }  # fmt: skip
    launch_triton(
        _split_kernel, (splits, K, S),
        q_THE, k_TKE, v_TKE, kv_cache, out_THE, partial, lse, block_table, query_start, seq_len,
        Q_ROW=q_THE.stride(0), Q_HEAD=q_THE.stride(1), K_ROW=k_TKE.stride(0), K_HEAD=k_TKE.stride(1),
        V_ROW=v_TKE.stride(0), V_HEAD=v_TKE.stride(1), CACHE_PAGE=kv_cache.stride(0), CACHE_KV=kv_cache.stride(1),
        CACHE_HEAD=kv_cache.stride(2), CACHE_POS=kv_cache.stride(3), TABLE_ROW=block_table.stride(0),
        SCALE=score_scale, LOG2E_CAP=log2e_cap, WRITE=write, G=H // K, G_PAD=power_of_2(H // K), P=P,
        EMULATED=triton.knobs.runtime.interpret,
        num_warps=warps, num_stages=stages, **shared,
    )  # fmt: skip
    if splits > 1:
        launch_triton(
            _join_kernel, (H, S), out_THE, partial, lse, query_start, seq_len,
            SPLITS_PAD=power_of_2(splits, 2), num_warps=4, **shared,
        )  # fmt: skip


def plan_splits(S: object, K: int, longest: int, dtype: torch.dtype, E: int) -> dict[str, int]:
    """Launch constants of decode from static facts: sequences (symbolic when dynamic), KV heads, longest context.

    Few sequences: ranges of at least a tile or two until the chip holds about four programs a processor. Many: one
    range each would do if lengths were equal; contexts that may be long get more, of at least 512 tokens, so that one
    long sequence does not run alone at the end. Measured on an H200, see bench/results/triton_h200.md.
    """
    rows = S * K if isinstance(S, int) else 0
    if not rows:  # dynamic batches: mixed steps are long, so the ranges suit many sequences
        splits, least = 8, 512
    elif rows < 512:
        splits = min(16 if longest <= 16384 else 32, -(-512 // rows))
        least = 64 if splits >= 16 else 128 if splits >= 8 else 256
    else:
        splits = 1 if longest <= 1024 else 2 if longest <= 8192 else 4 if longest <= 32768 else 8
        least = 256 if rows < 1024 else 512
    if dtype == torch.float32:
        block_n, stages = 32, 2
    else:
        # Programs that are alone on their processor keep more tiles in flight.
        block_n, stages = 64 if E <= 128 else 32, 3 if 0 < rows <= 16 else 2
    splits = max(1, min(splits, -(-longest // least)))
    return {"splits": splits, "min_tiles": max(1, least // block_n), "block_n": block_n, "warps": 4, "stages": stages}


@paged_attention.impl(
    "triton_decode", device="cuda", supports=lambda site: site.bucket.kind == "decode" and attends(site)
)
def triton_decode(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Pure decode: every sequence has zero or one query token."""
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    K, P, E = kv_cache.shape[2:]
    plan = plan_splits(seq_len.shape[0], K, block_table.shape[1] * P, q_THE.dtype, E)
    launch_decode(
        q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start, seq_len, out_THE, scale, window, softcap,
        write=True, **plan,
    )  # fmt: skip
    return out_THE
