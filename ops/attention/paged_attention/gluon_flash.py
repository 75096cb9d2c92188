"""Attention of prompts on Hopper, as the warp-specialized kernel of `gluon_prefill` runs it: a warp brings tiles of
keys and values from the cache's blocks into shared memory, and two groups of four warps multiply, each for half of the
query rows.

The tensor cores work asynchronously, and what keeps them busy is that a group always has a product to wait for: the
scores of the next tile and the output of the one before are under way while it makes the softmax between. The groups
take turns in starting products, so that one makes its softmax while the other one's are computed. Tiles are brought by
the TMA unit, which computes addresses and swizzles itself: one instruction for 64 entries of each token of a block.

A program takes work items one after another, each a block of query tokens of one sequence for one KV head, all query
heads of that KV head packed into its rows. Tiles are taken from the last to the first: those that the causal mask cuts
come first. `triton_prefill` has the same kernel for all other GPUs and cases.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM108, RUF005, RUF059  (a branch on a constexpr joins no other condition; Gluon unpacks all or nothing)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6


@gluon.jit
def find_item(item, items, query_start_ptr, seq_len_ptr, S, K: gl.constexpr, BLOCK_Q: gl.constexpr):
    """A work item's sequence, its first row, its query tokens, its length, and how many of those come before the item.

    Items with long contexts come first. Sequence s has its items from row // BLOCK_Q + s on, as `triton_prefill` has.
    """
    block = items // K - 1 - item // K
    s = gl.to_tensor(0)
    end = gl.to_tensor(S)
    while end - s > 1:
        middle = (s + end) // 2
        before = gl.load(query_start_ptr + middle) // BLOCK_Q + middle <= block
        s = gl.where(before, middle, s)
        end = gl.where(before, end, middle)
    row0 = gl.load(query_start_ptr + s)
    queries = gl.load(query_start_ptr + s + 1) - row0
    length = gl.load(seq_len_ptr + s)
    return s, row0, queries, length, (block - row0 // BLOCK_Q - s) * BLOCK_Q


@gluon.jit
def item_tiles(queries, length, skip, WINDOW: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr):
    """What an item reads: the first position that a row sees; its tile; the first tile that the window does not cut;
    the first one that the causal mask cuts; one past the last tile."""
    low = length - queries + skip
    end = gl.minimum(low + BLOCK_Q, length)
    full = (low + 1) // BLOCK_N
    begin = 0
    first = 0
    inner = 0
    if WINDOW > 0:
        begin = gl.maximum(low - WINDOW + 1, 0)
        first = begin // BLOCK_N
        whole = gl.maximum(end - WINDOW, 0)
        inner = gl.maximum(gl.minimum((whole + BLOCK_N - 1) // BLOCK_N, full), first)
    return begin, first, inner, full, (end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def nth_item(n):
    """The n-th item of a program: every other round backwards, so that programs have equal work."""
    programs = gl.num_programs(0)
    return n * programs + gl.where(n % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))


@gluon.jit
def _block_rows(
    table_row, tile, begin, length, head,
    CACHE_BLOCK: gl.constexpr, CACHE_HEAD: gl.constexpr, CACHE_POS: gl.constexpr, P: gl.constexpr,
    BLOCK_N: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Where the head's keys of each block of a tile begin, in rows of the cache. Where no row sees a block, it may be
    somebody else's by now: the nearest one that some row sees stands for it."""
    rows = ()
    for i in gl.static_range(PARTS):
        position = tile * BLOCK_N + i * P
        seen = gl.maximum(gl.minimum(position, length - 1), begin)
        block = gl.load(table_row + seen // P)
        row = block * (CACHE_BLOCK // CACHE_POS) + head * (CACHE_HEAD // CACHE_POS) + position % P
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _load_blocks(entries, rows, offset, tile, arrived, E: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Ask for a tile of keys or values, which begin ``offset`` rows after ``rows``, a number for each of its blocks."""
    TOKENS: gl.constexpr = BLOCK_N // PARTS
    mbarrier.expect(arrived, BLOCK_N * E * 2)
    for i in gl.static_range(PARTS):
        for column in gl.static_range(0, E, 64):
            part = tile.slice(i * TOKENS, TOKENS, dim=0).slice(column, 64, dim=1)
            load_tile(entries, [rows[i] + offset, column], arrived, part)


@gluon.jit
def bring_tiles(
    entries, keys, values, k_full, k_free, v_full, v_free, table_ptr, query_start_ptr, seq_len_ptr, S, items,
    few, CACHE_BLOCK: gl.constexpr, CACHE_KV: gl.constexpr, CACHE_HEAD: gl.constexpr, CACHE_POS: gl.constexpr,
    TABLE_ROW: gl.constexpr, WINDOW: gl.constexpr, K: gl.constexpr, G: gl.constexpr, E: gl.constexpr, P: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ASCENDING: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room. ASCENDING: from an item's first tile
    to its last, else the other way."""
    STEP: gl.constexpr = 1 if ASCENDING else -1
    BLOCK_Q: gl.constexpr = 128 // G
    PARTS: gl.constexpr = BLOCK_N // P if P < BLOCK_N else 1
    n_tile = 0
    for n in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = nth_item(n)
        if item < items:
            s, row0, queries, length, skip = find_item(item, items, query_start_ptr, seq_len_ptr, S, K, BLOCK_Q)
            if (queries > few) & (skip < queries):
                begin, first, inner, full, last = item_tiles(queries, length, skip, WINDOW, BLOCK_Q, BLOCK_N)
                table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
                head = item % K
                tile = first if ASCENDING else last - 1
                rows = _block_rows(
                    table_row, tile, begin, length, head, CACHE_BLOCK, CACHE_HEAD, CACHE_POS, P, BLOCK_N, PARTS
                )
                for _ in range(last - first):
                    tile += STEP
                    stage = n_tile % STAGES
                    lap = (n_tile // STAGES) & 1
                    mbarrier.wait(k_free.index(stage), lap ^ 1)
                    _load_blocks(entries, rows, 0, keys.index(stage), k_full.index(stage), E, BLOCK_N, PARTS)
                    following = _block_rows(  # a tile ahead, because loads take long
                        table_row, tile, begin, length, head, CACHE_BLOCK, CACHE_HEAD, CACHE_POS, P, BLOCK_N,
                        PARTS,
                    )  # fmt: skip
                    mbarrier.wait(v_free.index(stage), lap ^ 1)
                    _load_blocks(
                        entries, rows, CACHE_KV // CACHE_POS, values.index(stage), v_full.index(stage), E, BLOCK_N,
                        PARTS,
                    )  # fmt: skip
                    rows = following
                    n_tile += 1


@gluon.jit
def store_queries(
    queries, q_ptr, q_norm_ptr, cos_ptr, sin_ptr, row, heads, valid,
    Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, E: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr,
    EPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """A group's query rows into shared memory, normalized and rotated as by `triton_common.rotate`, in halves: an entry
    is rotated with that of the other one."""
    HALF: gl.constexpr = E // 2
    e = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    inside = valid[:, None]
    at = q_ptr + (row * Q_ROW + heads * Q_HEAD)[:, None] + e[None, :]
    low = gl.load(at, mask=inside, other=0.0)
    high = gl.load(at + HALF, mask=inside, other=0.0)
    dtype = low.dtype
    if NORM or F > 0:
        x = low.to(gl.float32)
        y = high.to(gl.float32)
        if NORM:
            scale = (1.0 / gl.sqrt((gl.sum(x * x, 1) + gl.sum(y * y, 1)) / E + EPS))[:, None]
            weight = gl.load(q_norm_ptr + e).to(gl.float32)[None, :]
            other = gl.load(q_norm_ptr + HALF + e).to(gl.float32)[None, :]
            x = ((x * scale).to(dtype).to(gl.float32) * weight).to(dtype).to(gl.float32)
            y = ((y * scale).to(dtype).to(gl.float32) * other).to(dtype).to(gl.float32)
        if F > 0:
            angle = (row * F)[:, None] + e[None, :]
            cos = gl.load(cos_ptr + angle, mask=inside, other=1.0).to(dtype).to(gl.float32)
            sin = gl.load(sin_ptr + angle, mask=inside, other=0.0).to(dtype).to(gl.float32)
            low = (x * cos - y * sin).to(dtype)
            high = (y * cos + x * sin).to(dtype)
        else:
            low = x.to(dtype)
            high = y.to(dtype)
    queries.slice(0, HALF, dim=1).store(low)
    queries.slice(HALF, HALF, dim=1).store(high)
    hopper.fence_async_shared()


@gluon.jit
def clear_values(values, low, high, BLOCK_N: gl.constexpr, E: gl.constexpr):
    """Zeros in the rows of a tile of values before ``low`` and from ``high`` on: no row sees them, but 0 * NaN is NaN.
    Both groups do it, with the same result, so none waits for the other one."""
    PART: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [4, 1], [1, 0])
    for i in gl.static_range(0, BLOCK_N, PART):
        part = values.slice(i, PART, dim=0)
        row = i + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        found = part.load(layout)
        part.store(gl.where(((row >= low) & (row < high))[:, None], found, gl.zeros_like(found)))
    hopper.fence_async_shared()


@gluon.jit
def softmax(
    scores, top, total, position, tile,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, BLOCK_N: gl.constexpr, ALIKE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Weights of a tile, the rows' new maxima and sums, and what older sums are to be multiplied by. ALIKE: which
    multiplications and additions are one instruction is said here, since two compilers could choose otherwise."""
    if MASKED:
        at = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * SCALE)
    shift = new_top
    if MASKED:  # a row may have seen nothing yet
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    if ALIKE:
        weights = gl.exp2(gl.fma(scores, SCALE, -shift[:, None]))
    else:
        weights = gl.exp2(scores * SCALE - shift[:, None])
    rescale = gl.exp2(top - shift)
    if ALIKE:
        total = gl.fma(total, rescale, gl.sum(weights, 1))
    else:
        total = total * rescale + gl.sum(weights, 1)
    return weights, new_top, total, rescale


@gluon.jit
def _start_scores(queries, keys, stage, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Ask for the scores of a tile: the sum of the products of parts, of which queries and keys have one or several."""
    scores = gl.zeros([64, BLOCK_N], gl.float32, layout=layout)
    for i in gl.static_range(len(queries)):
        scores = hopper.warpgroup_mma(
            queries[i], keys[i].index(stage).permute((1, 0)), scores, use_acc=i > 0, is_async=True
        )
    return scores


@gluon.jit
def first_scores(
    queries, keys, k_full, k_free, turn, n_tile,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scores of an item's first tile, the n_tile-th. queries, keys: tuples of their parts."""
    stage = n_tile % STAGES
    mbarrier.wait(k_full.index(stage), (n_tile // STAGES) & 1)
    if TURNS:
        mbarrier.wait(turn.index(GROUP), n_tile & 1)
    coming = _start_scores(queries, keys, stage, BLOCK_N, layout)
    if TURNS:
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
    scores = hopper.warpgroup_mma_wait(0, deps=[coming])
    mbarrier.arrive(k_free.index(stage), count=1)
    return scores


@gluon.jit
def following_scores(
    queries, keys, values, weights, acc, k_free, v_full, turn, n_tile,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scores of the tile after the n_tile-th, and the product of the n_tile-th with its values, which is under way."""
    stage = n_tile % STAGES
    following = (n_tile + 1) % STAGES
    if TURNS:
        mbarrier.wait(turn.index(GROUP), (n_tile + 1) & 1)
    coming = _start_scores(queries, keys, following, BLOCK_N, layout)
    mbarrier.wait(v_full.index(stage), (n_tile // STAGES) & 1)
    product = hopper.warpgroup_mma(weights, values.index(stage), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
    scores = hopper.warpgroup_mma_wait(1, deps=[coming])
    mbarrier.arrive(k_free.index(following), count=1)
    return scores, product


@gluon.jit
def write_rows(
    acc, total, out_ptr, row0, queries, skip, head,
    H: gl.constexpr, G: gl.constexpr, E: gl.constexpr, GROUP: gl.constexpr, out_layout: gl.constexpr,
):  # fmt: skip
    """The output of a group's rows."""
    BLOCK_Q: gl.constexpr = 128 // G
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))[:, None]
    m = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
    token = skip + m // G
    valid = (m < BLOCK_Q * G) & (token < queries)
    e = gl.arange(0, E, layout=gl.SliceLayout(0, out_layout))
    out = out_ptr + (((row0 + token).to(gl.int64) * H + head * G + m % G) * E)[:, None] + e[None, :]
    gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@gluon.jit
def attend_tiles(
    lo, hi, first, n_tile, weights, acc, top, total, position, queries, keys, values, k_full, k_free, v_full, v_free,
    turn, MASKED: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, GROUP: gl.constexpr, out_layout: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Tiles from hi - 1 down to lo. ``weights`` are of the tile before, the n_tile-th; its product with values is still
    to be made, and so is the last tile's at the end."""
    for i in range(hi - lo):
        tile = hi - 1 - i
        stage = n_tile % STAGES
        scores, product = following_scores(
            queries, keys, values, weights, acc, k_free, v_full, turn, n_tile, BLOCK_N, STAGES, TURNS, GROUP, layout
        )
        new, top, total, rescale = softmax(
            scores, top, total, position, tile, MASKED, WINDOW, SCALE, BLOCK_N, False, layout
        )
        # The branches of this wait keep ptxas from making the softmax after the product that it is to hide.
        mbarrier.wait(k_full.index((n_tile + 2) % STAGES), ((n_tile + 2) // STAGES) & 1, pred=tile > first)
        acc, new = hopper.warpgroup_mma_wait(0, deps=[product, new])
        mbarrier.arrive(v_free.index(stage), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
        n_tile += 1
    return n_tile, weights, acc, top, total
