"""What the Hopper kernels of decode share: who has which tiles of the cache, and the warps that bring them.

A tile has 64 tokens, in four groups of 128 numbers of their latents; the rotated parts come with the last group. Groups
come one by one and go two by two. Queries of a sequence come as soon as those of the one before have been read.
"""

# mypy: allow-untyped-defs
# ruff: noqa: RUF005, RUF059  (Gluon unpacks all or nothing)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from graphllm.ops.attention.latent_attention.triton_absorb import RECORD as _RECORD
from graphllm.program.specs import LATENT_GROUP

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # until Triton 3.6
_OLD = not hasattr(async_copy, "async_load")  # until Triton 3.6
_copy = async_copy.async_copy_global_to_shared if _OLD else async_copy.async_load

RECORD = gl.constexpr(_RECORD.value)
TILE = gl.constexpr(64)  # tokens
LATENT = gl.constexpr(512)
GROUP = gl.constexpr(LATENT_GROUP)
GROUPS = gl.constexpr(512 // LATENT_GROUP)
ROTATED = gl.constexpr(64)
_PIECE = gl.constexpr(16)  # tokens of a tile in 8 bits that are converted at once
_PIECES = gl.constexpr(4)


@gluon.jit
def first_item(plan_ptr, program):
    """As in `triton_absorb`."""
    at = plan_ptr + program * RECORD
    return (
        gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5),
        gl.load(at + 6), gl.load(at + 7),
    )  # fmt: skip


@gluon.jit
def sequence(plan_ptr, query_start_ptr, seq_len_ptr, s, S, PROGRAMS: gl.constexpr):
    """A sequence's first tile of all, one past its last, its query tokens and its length. Groups of warps ask for a
    sequence while they are at the one before, because loads take long."""
    s = gl.minimum(s, S - 1)
    begin = gl.load(plan_ptr + PROGRAMS * RECORD + s)
    end = gl.load(plan_ptr + PROGRAMS * RECORD + s + 1)
    tokens = gl.load(query_start_ptr + s + 1) - gl.load(query_start_ptr + s)
    return begin, end, tokens, gl.load(seq_len_ptr + s)


@gluon.jit
def _cache_rows(
    table_row, i, length, CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """In which rows of the cache the parts of a sequence's i-th tile begin, each of one block. The last block that it
    owns stands for those beyond its length."""
    rows = ()
    for part in gl.static_range(PARTS):
        position = i * TILE + part * (TILE // PARTS)
        block = gl.load(table_row + gl.maximum(gl.minimum(position, length - 1), 0) // P)
        rows = rows + (block * (CACHE_BLOCK // CACHE_POS) + position % P,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _bring_queries(q_entries, queries, q_rotated, arrived, read, row, item, ROWS: gl.constexpr):
    """Rows of queries, when those of the item before have been read."""
    mbarrier.wait(read, (item & 1) ^ 1)
    mbarrier.expect(arrived, ROWS * (LATENT + ROTATED) * 2)
    for g in gl.static_range(GROUPS):
        for column in gl.static_range(0, GROUP, 64):
            to = queries.index(g).slice(0, ROWS, dim=0).slice(column, 64, dim=1)
            load_tile(q_entries, [row, g * GROUP + column], arrived, to)
    load_tile(q_entries, [row, LATENT], arrived, q_rotated.slice(0, ROWS, dim=0))


@gluon.jit
def bring_tiles(
    entries, q_entries, queries, q_rotated, latents, rotated, arrived, read, full, free, program, first_m, plan_ptr,
    table_ptr, query_start_ptr, seq_len_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr, P: gl.constexpr, QH: gl.constexpr,
    ROWS: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room.

    arrived, read: barriers of queries. full: of groups of tiles. free: of halves, two groups each.
    first_m: the program's first query row of a sequence's QH, of which it has ROWS."""
    PARTS: gl.constexpr = TILE // P if P < TILE else 1
    TOKENS: gl.constexpr = TILE // PARTS
    tile, last, s, begin, end, tokens, length, block = first_item(plan_ptr, program)
    if PARTS == 1:
        rows = (block * (CACHE_BLOCK // CACHE_POS) + (tile - begin) * TILE % P,)
    else:
        table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
        rows = _cache_rows(table_row, tile - begin, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
    n = 0
    item = 0
    while tile < last:
        following = sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
        if tile < end:
            _bring_queries(q_entries, queries, q_rotated, arrived, read, s * QH + first_m, item, ROWS)
            item += 1
            for i in range(tile - begin, end - begin):
                next_rows = _cache_rows(table_row, i + 1, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
                stage = n % STAGES
                for g in gl.static_range(GROUPS):
                    bar = full.index(stage * GROUPS + g)
                    if g % 2 == 0:
                        mbarrier.wait(free.index(stage * 2 + g // 2), ((n // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, TILE * (GROUP + (ROTATED if g == GROUPS - 1 else 0)) * 2)
                    for part in gl.static_range(PARTS):
                        for column in gl.static_range(0, GROUP, 64):
                            to = latents.index(stage * GROUPS + g).slice(part * TOKENS, TOKENS, dim=0)
                            to = to.slice(column, 64, dim=1)
                            load_tile(entries, [rows[part], g * GROUP + column], bar, to)
                        if g == GROUPS - 1:
                            to = rotated.index(stage).slice(part * TOKENS, TOKENS, dim=0)
                            load_tile(entries, [rows[part], LATENT], bar, to)
                rows = next_rows
                n += 1
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following
        table_row = table_ptr + gl.minimum(s, S - 1).to(gl.int64) * TABLE_ROW
        rows = _cache_rows(table_row, 0, length, CACHE_BLOCK, CACHE_POS, P, PARTS)


@gluon.jit
def _piece(words, rows, i: gl.constexpr, CACHE_POS: gl.constexpr):
    """Where the i-th 16 tokens of a tile begin in the cache."""
    PER_PART: gl.constexpr = _PIECES // len(rows)
    return words + (rows[i // PER_PART] + i % PER_PART * _PIECE).to(gl.int64) * (CACHE_POS // 4)


@gluon.jit
def _load_group(words, rows, g: gl.constexpr, CACHE_POS: gl.constexpr, layout: gl.constexpr):
    """Of each piece of a tile the words of the g-th group of latents [_PIECE, GROUP // 4] and their scales."""
    t = gl.arange(0, _PIECE, layout=gl.SliceLayout(1, layout)) * (CACHE_POS // 4)
    w = g * (GROUP // 4) + gl.arange(0, GROUP // 4, layout=gl.SliceLayout(0, layout))
    found = ()
    for i in gl.static_range(_PIECES):
        row = _piece(words, rows, i, CACHE_POS)
        scales = gl.load((row + LATENT // 4 + g).to(gl.pointer_type(gl.float32), bitcast=True) + t)
        found = found + ((gl.load(row + t[:, None] + w[None, :]), scales),)  # type: ignore[assignment]
    return found


@gluon.jit
def _numbers(words, scales):
    """The bfloat16 numbers [T, 4 * W] that words [T, W] of four entries stand for."""
    a, b, c, d = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high, h<4>;
        .reg .b32 v, w;
        .reg .f32 f<4>;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 v, low;
        cvt.rn.f16x2.e4m3x2 w, high;
        mov.b32 {h0, h1}, v;
        mov.b32 {h2, h3}, w;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        mul.f32 f0, f0, $5;
        mul.f32 f1, f1, $5;
        mul.f32 f2, f2, $5;
        mul.f32 f3, f3, $5;
        cvt.rn.bf16x2.f32 v, f1, f0;
        cvt.rn.bf16x2.f32 w, f3, f2;
        mov.b32 {$0, $1}, v;
        mov.b32 {$2, $3}, w;
        }
        """,
        "=h,=h,=h,=h,r,f", [words, scales[:, None]], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [words.shape[0], 4 * words.shape[1]])


@gluon.jit
def _convert(group, to):
    """Write the numbers of a group of a tile into shared memory."""
    for j in gl.static_range(_PIECES):
        words, scales = group[j]
        to.slice(j * _PIECE, _PIECE).store(_numbers(words, scales))


@gluon.jit
def _prefetch(words, rows, CACHE_POS: gl.constexpr):
    """Ask for the parts of a tile to be brought to the L2 cache, by one thread of the group."""
    BYTES: gl.constexpr = TILE // len(rows) * CACHE_POS
    for part in gl.static_range(len(rows)):
        gl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 first, t, 0;"
            " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,n",
            [(words + rows[part].to(gl.int64) * (CACHE_POS // 4)).to(gl.int64), BYTES], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def convert_tiles(
    cache_ptr, q_entries, queries, q_rotated, latents, rotated, arrived, read, full, free, program, first_m, plan_ptr,
    table_ptr, query_start_ptr, seq_len_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr, P: gl.constexpr, QH: gl.constexpr,
    ROWS: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of warps does that fills shared memory from a cache in 8 bits, half a tile at a time. The other
    half is on its way to registers then, and the next two tiles to the L2 cache. A fence waits for all loads, so they
    begin after it. Arguments are those of `bring_tiles`."""
    PARTS: gl.constexpr = TILE // P if P < TILE else 1
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    words = cache_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    r = gl.arange(0, ROTATED, layout=gl.SliceLayout(0, wide))[None, :]
    t = gl.arange(0, _PIECE, layout=gl.SliceLayout(1, wide))[:, None]
    tile, last, s, begin, end, tokens, length, block = first_item(plan_ptr, program)
    if PARTS == 1:
        rows = (block * (CACHE_BLOCK // CACHE_POS) + (tile - begin) * TILE % P,)
    else:
        table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
        rows = _cache_rows(table_row, tile - begin, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
    n = 0
    item = 0
    while tile < last:
        following = sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
        if tile < end:
            rows1 = _cache_rows(table_row, tile - begin + 1, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
            rows2 = _cache_rows(table_row, tile - begin + 2, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
            group0 = _load_group(words, rows, 0, CACHE_POS, layout)
            group1 = _load_group(words, rows, 1, CACHE_POS, layout)
            group2 = _load_group(words, rows, 2, CACHE_POS, layout)
            group3 = _load_group(words, rows, 3, CACHE_POS, layout)
            _prefetch(words, rows1, CACHE_POS)
            _bring_queries(q_entries, queries, q_rotated, arrived, read, s * QH + first_m, item, ROWS)
            item += 1
            for i in range(tile - begin, end - begin):
                stage = n % STAGES
                rows3 = _cache_rows(table_row, i + 3, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
                _prefetch(words, rows2, CACHE_POS)
                at = stage * GROUPS
                mbarrier.wait(free.index(stage * 2), ((n // STAGES) & 1) ^ 1)
                _convert(group0, latents.index(at))
                _convert(group1, latents.index(at + 1))
                hopper.fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(at), count=1)
                mbarrier.arrive(full.index(at + 1), count=1)
                group0 = _load_group(words, rows1, 0, CACHE_POS, layout)
                group1 = _load_group(words, rows1, 1, CACHE_POS, layout)
                mbarrier.wait(free.index(stage * 2 + 1), ((n // STAGES) & 1) ^ 1)
                for j in gl.static_range(_PIECES):
                    entry = _piece(words, rows, j, CACHE_POS) + LATENT // 4 + GROUPS
                    entry = entry.to(gl.pointer_type(gl.bfloat16), bitcast=True) + t * (CACHE_POS // 2) + r
                    _copy(rotated.index(stage).slice(j * _PIECE, _PIECE), entry)
                async_copy.commit_group()
                _convert(group2, latents.index(at + 2))
                _convert(group3, latents.index(at + 3))
                async_copy.wait_group(0)
                hopper.fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(at + 2), count=1)
                mbarrier.arrive(full.index(at + 3), count=1)
                group2 = _load_group(words, rows1, 2, CACHE_POS, layout)
                group3 = _load_group(words, rows1, 3, CACHE_POS, layout)
                rows = rows1
                rows1 = rows2
                rows2 = rows3
                n += 1
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following
        table_row = table_ptr + gl.minimum(s, S - 1).to(gl.int64) * TABLE_ROW
        rows = _cache_rows(table_row, 0, length, CACHE_BLOCK, CACHE_POS, P, PARTS)


@gluon.jit
def clear(values, first, PART: gl.constexpr):
    """Zeros in the rows of a group from ``first`` on: no query sees them, but 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for i in gl.static_range(0, TILE, PART):
        some = values.slice(i, PART, dim=0)
        row = i + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        found = some.load(layout)
        some.store(gl.where((row < first)[:, None], found, gl.zeros_like(found)))
