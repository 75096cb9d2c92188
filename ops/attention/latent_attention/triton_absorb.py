"""Triton kernels around attention in latent space: queries on their way in, results on their way out.

The first kernel multiplies queries with the keys' up-projection, writes the step's latents to the cache, and makes the
plan of the attention kernel between. The plan divides the tokens of all sequences evenly among a fixed number of
programs, so one captured launch serves all lengths. A program has consecutive tiles of consecutive sequences. What
program p computes for sequence s is part p + s; no two pairs have the same sum, because one of both grows from pair to
pair. The last kernel joins the parts of a sequence, in order, and multiplies with the values' up-projection.

Both kernels read weights before the kernel before them has ended.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_common import cache_constants, problem, store_latents
from graphllm.ops.attention.paged_attention.triton_common import multiply, power_of_2

Config = Mapping[str, Any]
_STORED = 8


RECORD = tl.constexpr(8)  # numbers that the plan has for a program


@triton.jit
def _first_program(tile, total, PROGRAMS: tl.constexpr):
    """The first program whose tiles begin at ``tile`` or later. Program p of as many as have tiles begins at p / their
    number of all tiles."""
    total = tl.maximum(total, 1)
    return (tile * tl.minimum(PROGRAMS, total) + total - 1) // total


@triton.jit
def _sequences(query_start_ptr, seq_len_ptr, s, S, Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of sequences their tiles, none if they have no query token or more than Q, their query tokens and lengths."""
    known = s < S
    tokens = tl.load(query_start_ptr + s + 1, mask=known, other=0) - tl.load(query_start_ptr + s, mask=known, other=0)
    length = tl.load(seq_len_ptr + s, mask=known, other=0)
    return tl.where((tokens > 0) & (tokens <= Q), (length + BLOCK_N - 1) // BLOCK_N, 0), tokens, length


@triton.jit
def _make_plan(
    plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
    TABLE_ROW: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    PROGRAMS: tl.constexpr, PROGRAMS_PAD: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Write the plan: of each program where it begins [PROGRAMS, RECORD], see `first_item`, then of each sequence the
    tiles before it [S + 1]. Each program's sequence is found by bisection, so nothing is read one after the other."""
    total = 0
    for base in range(0, S, BLOCK_S):
        s = base + tl.arange(0, BLOCK_S)
        total += tl.sum(_sequences(query_start_ptr, seq_len_ptr, s, S, Q, BLOCK_N)[0])
    programs = tl.minimum(PROGRAMS, total)
    p = tl.arange(0, PROGRAMS_PAD)
    tile = p * total // tl.maximum(programs, 1)
    last = (p + 1) * total // tl.maximum(programs, 1)
    before_ptr = plan_ptr + PROGRAMS * RECORD
    record = plan_ptr + p * RECORD
    before = 0
    for base in range(0, S, BLOCK_S):
        s = base + tl.arange(0, BLOCK_S)
        tiles, tokens, length = _sequences(query_start_ptr, seq_len_ptr, s, S, Q, BLOCK_N)
        ends = before + tl.cumsum(tiles)
        passed = tl.zeros([PROGRAMS_PAD], tl.int32)  # sequences that end before the program begins
        step: tl.constexpr = BLOCK_S // 2
        for halving in tl.static_range(10):
            if step >> halving > 0:
                more = passed + (step >> halving)
                passed = tl.where(tl.gather(ends, more - 1, 0) <= tile, more, passed)
        begin = tl.gather(ends - tiles, passed, 0)
        end = tl.gather(ends, passed, 0)
        some = (p < programs) & (tile >= begin) & (tile < end)
        at = table_ptr + (base + passed).to(tl.int64) * TABLE_ROW + (tile - begin) * BLOCK_N // P
        block = tl.load(at, mask=some, other=0)
        if not EMULATED:
            tl.extra.cuda.gdc_wait()
        tl.store(before_ptr + s, ends - tiles, mask=s < S)
        tl.store(record, tile, mask=some)
        tl.store(record + 1, last, mask=some)
        tl.store(record + 2, base + passed, mask=some)
        tl.store(record + 3, begin, mask=some)
        tl.store(record + 4, end, mask=some)
        tl.store(record + 5, tl.gather(tokens, passed, 0), mask=some)
        tl.store(record + 6, tl.gather(length, passed, 0), mask=some)
        tl.store(record + 7, block, mask=some)
        before += tl.sum(tiles)
    tl.store(before_ptr + S, total)
    idle = (p >= programs) & (p < PROGRAMS)
    for field in tl.static_range(RECORD):
        tl.store(record + field, tl.zeros([PROGRAMS_PAD], tl.int32), mask=idle)


@triton.jit
def first_item(plan_ptr, program):
    """What the plan has of a program: its first tile of all, one past its last, its first sequence, that one's first
    tile and one past its last, its query tokens, its length, and the block of the cache where the first tile begins.
    All are zero for a program without tiles."""
    at = plan_ptr + program * RECORD
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7),
    )  # fmt: skip


@triton.jit
def _rows_of(query_start_ptr, row, S, Q: tl.constexpr):
    """Of rows s * Q + i: the sequence, its token in the step, and whether there is such a row."""
    s, i = row // Q, row % Q
    first = tl.load(query_start_ptr + s, mask=s < S, other=0)
    queries = tl.load(query_start_ptr + s + 1, mask=s < S, other=0) - first
    return s, first + i, (i < queries) & (queries <= Q)


@triton.jit(do_not_specialize_on_alignment=["S"])
def _absorb_kernel(
    q_ptr, q_rope_ptr, k_up_ptr, latent_ptr, k_rope_ptr, cache_ptr,
    absorbed_ptr,  # [S * Q, H, L + R]
    plan_ptr,  # int32, see `_make_plan`
    table_ptr, query_start_ptr, seq_len_ptr, S,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, ROPE_ROW: tl.constexpr, ROPE_HEAD: tl.constexpr, UP_HEAD: tl.constexpr,
    UP_ROW: tl.constexpr, LATENT_ROW: tl.constexpr, K_ROPE_ROW: tl.constexpr, CACHE_BLOCK: tl.constexpr,
    CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr,  # most query tokens of a sequence
    BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr, PROGRAMS_PAD: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a program
    BLOCK_L: tl.constexpr,
    STORED: tl.constexpr,  # tokens that a program stores in the cache
    STORING: tl.constexpr,  # programs that do so for BLOCK_M tokens; 0: the cache holds them already
    EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: tl.constexpr = (L + BLOCK_L - 1) // BLOCK_L
    column = tl.program_id(0)
    if column < H * COLUMNS:
        row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        _s, token, exists = _rows_of(query_start_ptr, row, S, Q)
        head = column // COLUMNS
        c = column % COLUMNS * BLOCK_L + tl.arange(0, BLOCK_L)
        n = tl.arange(0, N_PAD)
        weights = tl.load(
            k_up_ptr + head * UP_HEAD + (n * UP_ROW)[:, None] + c[None, :], mask=(n < N)[:, None] & (c < L)[None, :],
            other=0.0,
        )  # fmt: skip
        if not EMULATED:
            tl.extra.cuda.gdc_wait()
        token = token.to(tl.int64)
        at = (token * Q_ROW + head * Q_HEAD)[:, None] + n[None, :]
        q = tl.load(q_ptr + at, mask=exists[:, None] & (n < N)[None, :], other=0.0)
        to = absorbed_ptr + ((row.to(tl.int64) * H + head) * (L + R))[:, None]
        if column % COLUMNS == 0:
            r = tl.arange(0, R_PAD)
            inside = exists[:, None] & (r < R)[None, :]
            rotated = tl.load(q_rope_ptr + (token * ROPE_ROW + head * ROPE_HEAD)[:, None] + r[None, :], mask=inside)
            tl.store(to + L + r[None, :], rotated, mask=inside)
        absorbed = multiply(q, weights, tl.zeros([BLOCK_M, BLOCK_L], tl.float32), EMULATED)
        tl.store(to + c[None, :], absorbed.to(absorbed_ptr.dtype.element_ty), mask=exists[:, None] & (c < L)[None, :])
    elif column < H * COLUMNS + STORING:
        row = tl.program_id(1) * BLOCK_M + (column - H * COLUMNS) * STORED + tl.arange(0, STORED)
        s, token, exists = _rows_of(query_start_ptr, row, S, Q)
        position = tl.load(seq_len_ptr + s, mask=exists, other=0) + token
        position -= tl.load(query_start_ptr + s + 1, mask=exists, other=0)
        block = tl.load(table_ptr + s.to(tl.int64) * TABLE_ROW + position // P, mask=exists, other=0).to(tl.int64)
        slot = block * CACHE_BLOCK + (position % P) * CACHE_POS
        if not EMULATED:
            tl.extra.cuda.gdc_wait()
        store_latents(latent_ptr, k_rope_ptr, cache_ptr, token.to(tl.int64), slot, exists, LATENT_ROW, K_ROPE_ROW, L,
                      L_PAD, R, R_PAD, EMULATED)  # fmt: skip
    elif tl.program_id(1) == 0:
        _make_plan(plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S, TABLE_ROW, P, Q, BLOCK_N, BLOCK_S, PROGRAMS,
                   PROGRAMS_PAD, EMULATED)  # fmt: skip
    elif not EMULATED:
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize_on_alignment=["S"])
def _values_kernel(
    part_ptr,  # [PROGRAMS + S, Q, H, L]
    lse_ptr,  # float32 [PROGRAMS + S, Q, H], in units of log2
    v_up_ptr, plan_ptr, out_ptr, query_start_ptr, S,
    UP_HEAD: tl.constexpr, UP_ROW: tl.constexpr, H: tl.constexpr, V: tl.constexpr, L: tl.constexpr, Q: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr,
    PARTS: tl.constexpr,  # read at once
    EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    ROWS: tl.constexpr = max(BLOCK_M, 16)  # of a product
    head = tl.program_id(0) // COLUMNS
    v = tl.program_id(0) % COLUMNS * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.arange(0, BLOCK_L)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, token, exists = _rows_of(query_start_ptr, row, S, Q)
    up = v_up_ptr + head * UP_HEAD + (v * UP_ROW)[:, None] + c[None, :]
    weights = tl.load(up, mask=(v < V)[:, None] & (c < L)[None, :], other=0.0)
    before_ptr = plan_ptr + PROGRAMS * RECORD  # was there when the kernel before this one began
    total_tiles = tl.load(before_ptr + S)
    begin = tl.load(before_ptr + s, mask=exists, other=0)
    end = tl.load(before_ptr + s + 1, mask=exists, other=0)
    first = _first_program(begin + 1, total_tiles, PROGRAMS) - 1
    parts = tl.where(exists, _first_program(end, total_tiles, PROGRAMS) - first, 0)
    most = tl.max(parts)
    at = (((first + s).to(tl.int64) * Q + row % Q) * H + head)[:, None] + tl.arange(0, PARTS)[None, :] * (Q * H)
    j = tl.arange(0, PARTS)[None, :]
    known = j < parts[:, None]
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    found = tl.load(part_ptr + at[:, :, None] * L + c, mask=known[:, :, None] & (c < L)[None, None, :], other=0.0)
    lse = tl.load(lse_ptr + at, mask=known, other=float("-inf"))
    top = tl.max(lse, axis=1)
    for i in range(PARTS, most, PARTS):
        more = tl.load(lse_ptr + at + i * (Q * H), mask=i + j < parts[:, None], other=float("-inf"))
        top = tl.maximum(top, tl.max(more, axis=1))
    top = tl.where(top == float("-inf"), 0.0, top)[:, None]
    factors = tl.exp2(lse - top)
    total = tl.sum(factors, axis=1)
    for i in range(PARTS, most, PARTS):
        more = tl.load(lse_ptr + at + i * (Q * H), mask=i + j < parts[:, None], other=float("-inf"))
        total += tl.sum(tl.exp2(more - top), axis=1)
    share = (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    result = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for offset in tl.static_range(0, L, BLOCK_L):
        joined = tl.sum(found.to(tl.float32) * factors[:, :, None], axis=1)
        for i in range(PARTS, most, PARTS):
            some = i + j < parts[:, None]
            more = tl.exp2(tl.load(lse_ptr + at + i * (Q * H), mask=some, other=float("-inf")) - top)
            inside = some[:, :, None] & (offset + c < L)[None, None, :]
            found = tl.load(part_ptr + (at + i * (Q * H))[:, :, None] * L + offset + c, mask=inside, other=0.0)
            joined += tl.sum(found.to(tl.float32) * more[:, :, None], axis=1)
        joined = (joined * share).to(weights.dtype)
        factor = weights
        if offset + BLOCK_L < L:  # what comes next is on its way during the product
            following = offset + BLOCK_L + c
            inside = known[:, :, None] & (following < L)[None, None, :]
            found = tl.load(part_ptr + at[:, :, None] * L + following, mask=inside, other=0.0)
            in_up = (v < V)[:, None] & (following < L)[None, :]
            weights = tl.load(up + offset + BLOCK_L, mask=in_up, other=0.0)
        if BLOCK_M < ROWS:
            joined = tl.broadcast_to(joined[None, :, :], [ROWS // BLOCK_M, BLOCK_M, BLOCK_L])
        result = multiply(tl.reshape(joined, [ROWS, BLOCK_L]), tl.trans(factor), result, EMULATED)
    if BLOCK_M < ROWS:
        result = tl.max(tl.reshape(result, [ROWS // BLOCK_M, BLOCK_M, BLOCK_V]), axis=0)
    out = out_ptr + ((token.to(tl.int64) * H + head) * V)[:, None] + v[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (v < V)[None, :])


def attend_absorbed(
    attend: Callable[..., None], rows: LatentRows, up: UpProjections, paged: PagedLatents, out_THV: Tensor,
    scale: float, *, write: bool, queries: int, programs: int, block_n: int, absorb_m: int, absorb_l: int,
    values_m: int, values_v: int, values_l: int, values_warps: int, parts_at_once: int,
    **config: int,
) -> None:  # fmt: skip
    """Attend for sequences of one to ``queries`` query tokens; the others are not touched.

    attend: what attends in latent space, called as `launch_attention` of `triton_decode`.
    write: whether the step's latents are stored in the cache, which else holds them already.
    programs: of the attention kernel that divide the tokens, in tiles of ``block_n``.
    absorb_m, absorb_l: rows of queries, and numbers of the latent, of a program of the first kernel.
    values_m, values_v, values_warps: rows, values and warps of a program of the last kernel.
    values_l, parts_at_once: numbers of the latent, and parts, that it reads at once.
    """
    (q_nope, q_rope, latent, k_rope), (k_up, v_up) = rows, up
    (H, N, L), V, R, S = k_up.shape, v_up.shape[1], q_rope.shape[2], paged.seq_lens.shape[0]
    absorbed = q_nope.new_empty(S * queries, H, L + R)
    parts = q_nope.new_empty(programs + S, queries, H, L)
    lse = torch.empty((programs + S, queries, H), dtype=torch.float32, device=q_nope.device)
    plan = torch.empty(programs * RECORD.value + S + 1, dtype=torch.int32, device=q_nope.device)
    _, table, query_start, seq_lens = paged
    cache = cache_constants(paged, L, R)
    shares = {"Q": queries, "PROGRAMS": programs}
    stored = absorb_m // _STORED if write else 0
    launch_triton(
        _absorb_kernel, (H * -(-L // absorb_l) + stored + 1, (S * queries + absorb_m - 1) // absorb_m),
        q_nope, q_rope, k_up, latent, k_rope, paged.latent_cache, absorbed, plan, table, query_start, seq_lens, S,
        Q_ROW=q_nope.stride(0), Q_HEAD=q_nope.stride(1), ROPE_ROW=q_rope.stride(0), ROPE_HEAD=q_rope.stride(1),
        UP_HEAD=k_up.stride(0), UP_ROW=k_up.stride(1), LATENT_ROW=latent.stride(0), K_ROPE_ROW=k_rope.stride(0),
        PROGRAMS_PAD=power_of_2(programs), H=H, N=N, N_PAD=power_of_2(N), BLOCK_N=block_n, BLOCK_S=512,
        BLOCK_M=absorb_m, BLOCK_L=absorb_l, STORED=_STORED, STORING=stored, num_warps=4, **cache, **shares,
    )  # fmt: skip
    attend(absorbed, paged, plan, parts, lse, scale, block_n=block_n, **shares, **config)
    launch_triton(
        _values_kernel, (H * -(-V // values_v), (S * queries + values_m - 1) // values_m),
        parts, lse, v_up, plan, out_THV, query_start, S, UP_HEAD=v_up.stride(0), UP_ROW=v_up.stride(1), H=H, V=V, L=L,
        BLOCK_M=values_m, BLOCK_V=values_v, BLOCK_L=values_l, PARTS=parts_at_once, EMULATED=cache["EMULATED"],
        num_warps=values_warps, **shares,
    )  # fmt: skip


def plan_absorbed(site: CallSite, most: int, queries: int) -> Config:
    """Launch constants of `attend_absorbed` but for the attention kernel's, for up to ``most`` sequences of up to
    ``queries`` query tokens. Of few rows many parts are read at once, because each turn of a loop waits for memory."""
    L, H, V = site.args["latent_TL"].shape[1], site.args["v_up_HVL"].shape[0], site.args["v_up_HVL"].shape[1]
    rows, wide = most * queries, site.args["q_nope_THN"].dtype.itemsize == 4
    values_m, values_v, values_l, at_once = _values_plan(rows, rows * H // site.target.multiprocessors)
    return {
        "queries": queries, "absorb_m": 16 if rows <= 16 else 32 if rows <= 32 or wide else 64,
        "absorb_l": min(64, power_of_2(L)), "values_m": values_m, "values_v": min(values_v, power_of_2(V)),
        "values_l": min(64 if wide else values_l, power_of_2(L)), "values_warps": 8, "parts_at_once": at_once,
    }  # fmt: skip


def _values_plan(rows: int, share: int) -> tuple[int, int, int, int]:
    """Rows, values, numbers of the latent, and parts at once of `_values_kernel`, as they were fastest on an H200. Few
    rows have many parts; many rows read weights and parts once each.

    share: rows of all heads for a multiprocessor."""
    if rows <= 4:
        return 4, 32, 512, 16
    if share < 3:
        return 4, 64, 512, 8
    return (8, 128, 256, 4) if share < 8 else (32, 128, 128, 4)


def is_absorbed(site: CallSite) -> bool:
    """Whether the site is decode or verification, of a kind that the kernels of this folder serve."""
    return site.bucket.kind == "decode" and not problem(site)
