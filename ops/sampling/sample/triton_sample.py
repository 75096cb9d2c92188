"""Triton kernels for sample: no sort, and most rows read their logits once.

The scan kernel reads every row in chunks and settles greedy rows and rows without a filter up to a comparison of the
chunks. The finish kernel does that comparison, and for a row with top-k, top-p or min-p works on candidates: a cut that
surely lies below the row's threshold comes from the scan (maxima of groups of tokens for top-k, the total mass for
top-p), the logits above it are gathered, lane by lane, into scratch, and the exact threshold is then found by search
over order-preserving integer keys. A row too flat for the scratch is searched in full, with the same result.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM108  (a branch on a constexpr is not a conditional expression)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ops.sampling.sample.op import sample
from graphllm.ops.sampling.sample.operands import Sampling

BLOCK = 2048  # lanes: logits that one program reads at a time
_DEPTH = 16  # candidates that a lane has room for
_PROGRAMS = 528  # of the scan: four for each processor of the chip that this was tuned on
_GROUPS = 2048  # groups of tokens; their maxima bound the k-th largest logit from below
_LEAST = tl.constexpr(-3.4028234663852886e38)  # the smallest finite float32
KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 key that are constant


@triton.jit
def _mix32(x):
    """The 32-bit finalizer of the specification, on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_bits_of(seed, sample_index):
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    return _mix32(sample_index.to(tl.uint32) ^ _mix32(low ^ _mix32(high)))


@triton.jit
def token_bits(token, row_bits):
    return _mix32(token.to(tl.uint32) * 0x9E3779B9 + row_bits)


@triton.jit
def uniform(bits):
    """u in (0, 1), float32 as in the specification."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def exponential(u):
    """-log1p(-u) to float32 accuracy, from an odd series below 1/2 and the logarithm above, where 1 - u is exact."""
    s = u / (2.0 - u)
    z = s * s
    r = 1.0 / 13 + z * (1.0 / 15 + z * (1.0 / 17))
    r = 1.0 / 7 + z * (1.0 / 9 + z * (1.0 / 11 + z * r))
    r = 1.0 + z * (1.0 / 3 + z * (1.0 / 5 + z * r))
    return tl.where(u < 0.5, 2.0 * s * r, -tl.log(1.0 - u))


@triton.jit
def logits_at(ptr, index, V, COL: tl.constexpr):
    """float32 logits, -inf beyond the vocabulary and for NaN."""
    x = tl.load(ptr + index * COL, mask=index < V, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("-inf"), x)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """An unsigned integer that orders as the float does."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)) >> SHIFT


@triton.jit
def _from_key(key, SHIFT: tl.constexpr):
    """The smallest float with the key ``key``."""
    wide = key << SHIFT
    negative = (wide >> 31) == 0
    return tl.where(negative, wide ^ 0xFFFFFFFF, wide ^ 0x80000000).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def off_top(x, temperature, top):
    """Scaled logit minus the row's largest, rounded as in the specification."""
    return tl.div_rn(x, temperature) - top


@triton.jit
def _weight(x, top_logit, rate):
    """exp(off) by the fast way, for sums; rate is log2(e) / temperature."""
    return tl.exp2((x - top_logit) * rate)


@triton.jit
def filters(top_k, top_p, min_p, V):
    by_k = (top_k > 0) & (top_k < V)
    return by_k, top_p < 1.0, min_p > 0.0


@triton.jit
def is_filtered(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V):
    """Whether a row with these parameters is drawn from with a filter."""
    by_k, by_p, by_min = filters(tl.load(top_k_ptr), tl.load(top_p_ptr), tl.load(min_p_ptr), V)
    return (tl.load(temperature_ptr) > 0) & (by_k | by_p | by_min)


@triton.jit
def best_of(row_ptr, lo, hi, count, last, COL: tl.constexpr, BLOCK: tl.constexpr):
    """Of tiles lo to hi of ``count`` logits: the largest of each lane, the largest of all, and the first index that has
    it, at most ``last``."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK], tl.int32) + lo
    for tile in tl.range(lo, hi, loop_unroll_factor=4):
        x = logits_at(row_ptr, tile * BLOCK + lane, count, COL)
        better = x > best
        best = tl.where(better, x, best)
        best_tile = tl.where(better, tile, best_tile)
    top = tl.max(best, axis=0)
    return best, top, tl.min(tl.where(best == top, best_tile * BLOCK + lane, last), axis=0)


@triton.jit
def race_of(
    row_ptr, lo, hi, count, first, last, index, row_bits, temperature, top_logit, scaled_top, rate,
    COL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the same tiles: the index that wins the race, ``index`` where none does, and its value. first: the token of
    the first logit."""
    lane = tl.arange(0, BLOCK)
    score = tl.full([], float("-inf"), tl.float32)
    for tile in range(lo, hi):
        x = logits_at(row_ptr, tile * BLOCK + lane, count, COL)
        bits = token_bits(first + tile * BLOCK + lane, row_bits)
        # Beating the score takes -log1p(-u) < exp(off - score), hence u below that: rare, so tested first, with 1 + u
        # from the bits' upper 23 and one fast exponential.
        one_and_u = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
        room = tl.exp2((x - top_logit) * rate - score * 1.4426950408889634) * 1.01
        if tl.max((one_and_u <= 1.0 + room).to(tl.int32), axis=0) > 0:
            race = off_top(x, temperature, scaled_top) - tl.log(exponential(uniform(bits)))
            tile_best = tl.max(race, axis=0)
            if tile_best > score:
                index = tl.min(tl.where(race == tile_best, tile * BLOCK + lane, last), axis=0)
                score = tile_best
    return index, score


@triton.jit
def _scan_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_index_ptr,
    chunk_top_ptr,  # [S, C] largest logit of the chunk
    chunk_score_ptr,  # [S, C] best race value, or sum of exp(scaled - the chunk's largest) for rows with only top-p
    chunk_id_ptr,  # [S, C] token of the largest logit, or the race's winner
    group_top_ptr,  # [S, GROUPS] largest logit of each group of tokens, for rows with top-k
    V: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    FILTERED: tl.constexpr,  # only the rows that have a filter
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    s = tl.program_id(1)
    row_ptr = logits_ptr + s.to(tl.int64) * ROW
    lane = tl.arange(0, BLOCK)
    TILES: tl.constexpr = (V + BLOCK - 1) // BLOCK
    PER_CHUNK: tl.constexpr = (TILES + CHUNKS - 1) // CHUNKS
    lo = tl.minimum(chunk * PER_CHUNK, TILES)
    hi = tl.minimum(lo + PER_CHUNK, TILES)
    if FILTERED:
        hi = tl.where(is_filtered(temperature_ptr + s, top_k_ptr + s, top_p_ptr + s, min_p_ptr + s, V), hi, lo)

    best, top, token = best_of(row_ptr, lo, hi, V, V - 1, COL, BLOCK)
    score = 0.0

    temperature = tl.load(temperature_ptr + s)
    if temperature > 0:
        by_k, by_p, by_min = filters(tl.load(top_k_ptr + s), tl.load(top_p_ptr + s), tl.load(min_p_ptr + s), V)
        top_logit = tl.where(top == float("-inf"), 0.0, top)
        rate = 1.4426950408889634 / temperature
        if by_k:
            W: tl.constexpr = GROUPS // CHUNKS
            group_top = tl.max(tl.reshape(best, [W, BLOCK // W]), axis=1)
            tl.store(group_top_ptr + s.to(tl.int64) * GROUPS + chunk * W + tl.arange(0, W), group_top)
        else:
            if by_p & (not by_min):
                mass = tl.zeros([BLOCK], tl.float32)
                for tile in tl.range(lo, hi, loop_unroll_factor=2):
                    mass += _weight(logits_at(row_ptr, tile * BLOCK + lane, V, COL), top_logit, rate)
                score = tl.sum(mass, axis=0)
        if not (by_k | by_p | by_min):
            scaled_top = tl.div_rn(top_logit, temperature)
            row_bits = row_bits_of(tl.load(seed_ptr + s), tl.load(sample_index_ptr + s))
            token, score = race_of(
                row_ptr, lo, hi, V, 0, V - 1, token, row_bits, temperature, top_logit, scaled_top, rate, COL, BLOCK
            )
    at = s * CHUNKS + chunk
    tl.store(chunk_top_ptr + at, top)
    tl.store(chunk_score_ptr + at, score)
    tl.store(chunk_id_ptr + at, token)


@triton.jit
def _search(
    src_ptr, count, target, lo, hi,
    BY_MASS: tl.constexpr,  # compare the sum of weights, else the number of logits
    top_logit, rate, COL: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key in [lo, hi) such that the logits with that key or a larger one reach the target; lo if none.

    Three keys a pass quarter the interval.
    """
    lane = tl.arange(0, BLOCK)
    for _ in range((33 - SHIFT) // 2):
        step = (hi - lo + 3) // 4
        key1, key2, key3 = lo + step, lo + 2 * step, lo + 3 * step
        at1 = tl.zeros([BLOCK], tl.float32 if BY_MASS else tl.int32)
        at2, at3 = at1, at1
        for start in range(0, tl.where(hi - lo > 1, count, 0), BLOCK):
            x = logits_at(src_ptr, start + lane, count, COL)
            key = _key(x, SHIFT)
            if BY_MASS:
                weight = _weight(x, top_logit, rate)
                at1 += tl.where(key >= key1, weight, 0.0)
                at2 += tl.where(key >= key2, weight, 0.0)
                at3 += tl.where(key >= key3, weight, 0.0)
            else:
                at1 += (key >= key1).to(tl.int32)
                at2 += (key >= key2).to(tl.int32)
                at3 += (key >= key3).to(tl.int32)
        # A key at or beyond hi is no candidate, whatever rounding makes of its sum.
        next1 = (tl.sum(at1, axis=0) >= target) & (key1 < hi)
        next2 = (tl.sum(at2, axis=0) >= target) & (key2 < hi)
        next3 = (tl.sum(at3, axis=0) >= target) & (key3 < hi)
        lo = tl.where(next3, key3, tl.where(next2, key2, tl.where(next1, key1, lo)))
        hi = tl.minimum(hi, lo + step)
    return lo


@triton.jit
def threshold(
    src_ptr,  # logits to choose among: candidates in scratch, or the row
    count,
    least,  # a key that no logit to keep falls below
    temperature, top_logit, top_k, top_p, min_p,
    mass,  # sum of exp(off) over the row; used for rows with only top-p
    V, COL: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest key that top-k and top-p keep, and the lowest off that min-p keeps."""
    lane = tl.arange(0, BLOCK)
    by_k, by_p, by_min = filters(top_k, top_p, min_p, V)
    floor = tl.where(by_min, tl.log(tl.where(by_min, min_p, 1.0)), float("-inf"))
    top = tl.div_rn(top_logit, temperature)
    rate = 1.4426950408889634 / temperature
    beyond = _key(top_logit, SHIFT) + 1
    cut = least
    if by_k:
        cut = _search(src_ptr, count, top_k, least, beyond, False, top_logit, rate, COL, SHIFT, BLOCK)
    if by_p:
        if by_k | by_min:
            sums = tl.zeros([BLOCK], tl.float32)
            kept = tl.zeros([BLOCK], tl.int32)
            for start in range(0, count, BLOCK):
                x = logits_at(src_ptr, start + lane, count, COL)
                inside = _key(x, SHIFT) >= cut
                kept += inside.to(tl.int32)
                inside = inside & (off_top(x, temperature, top) >= floor)
                sums += tl.where(inside, _weight(x, top_logit, rate), 0.0)
            mass = tl.sum(sums, axis=0)
            if by_k:
                # Ties with the k-th are kept, but only k logits count as the whole mass.
                last = _from_key(cut, SHIFT)
                extra = tl.maximum(tl.sum(kept, axis=0) - top_k, 0) * _weight(last, top_logit, rate)
                mass -= tl.where((extra > 0) & (off_top(last, temperature, top) >= floor), extra, 0.0)
        cut = _search(src_ptr, count, top_p * mass, cut, beyond, True, top_logit, rate, COL, SHIFT, BLOCK)
    return cut, floor


@triton.jit
def _draw(
    src_ptr,  # as for `threshold`
    tile_ptr,  # for candidates, the tile of the row that each came from
    count, least, temperature, top_logit, row_bits, top_k, top_p, min_p, mass, V, COL: tl.constexpr,
    CANDIDATES: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The race's winner among the logits that pass the row's filters."""
    lane = tl.arange(0, BLOCK)
    top = tl.div_rn(top_logit, temperature)
    cut, floor = threshold(
        src_ptr, count, least, temperature, top_logit, top_k, top_p, min_p, mass, V, COL, SHIFT, BLOCK
    )
    score = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], V - 1, tl.int32)
    for start in range(0, count, BLOCK):
        x = logits_at(src_ptr, start + lane, count, COL)
        if CANDIDATES:
            index = tl.load(tile_ptr + start + lane).to(tl.int32) * BLOCK + lane
        else:
            index = start + lane
        off = off_top(x, temperature, top)
        race = off - tl.log(exponential(uniform(token_bits(index, row_bits))))
        race = tl.where((_key(x, SHIFT) >= cut) & (off >= floor), race, float("-inf"))
        better = race > score
        score = tl.where(better, race, score)
        token = tl.where(better, index, token)
    return tl.min(tl.where(score == tl.max(score, axis=0), token, V - 1), axis=0)


@triton.jit
def _collect(x, tile, cut, used, candidates_ptr, tiles_ptr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Append the logits at or above the cut to their lanes' candidates; how many each lane found so far."""
    lane = tl.arange(0, BLOCK)
    take = x >= cut
    at = used * BLOCK + lane
    fits = take & (used < DEPTH)
    tl.store(candidates_ptr + at, x.to(candidates_ptr.dtype.element_ty), mask=fits)
    tl.store(tiles_ptr + at, (tile + lane * 0).to(tl.int16), mask=fits)
    return used + take.to(tl.int32)


@triton.jit
def _finish_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_index_ptr, chunk_top_ptr,
    chunk_score_ptr, chunk_id_ptr, group_top_ptr,
    candidate_ptr,  # [S, DEPTH, BLOCK] logits above the cut, each lane's packed from the first row
    candidate_tile_ptr, out_ptr, V: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr, FILTERED: tl.constexpr, SHIFT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    chunk_top = tl.load(chunk_top_ptr + s * CHUNKS + chunk)
    chunk_score = tl.load(chunk_score_ptr + s * CHUNKS + chunk)
    chunk_id = tl.load(chunk_id_ptr + s * CHUNKS + chunk)
    top_logit = tl.max(chunk_top, axis=0)
    possible = top_logit > float("-inf")
    token = tl.where(possible, tl.min(tl.where(chunk_top == top_logit, chunk_id, V - 1), axis=0), -1)
    temperature = tl.load(temperature_ptr + s)
    if (temperature > 0) & possible:
        top = tl.div_rn(top_logit, temperature)
        lower = off_top(chunk_top, temperature, top)
        top_k, top_p, min_p = tl.load(top_k_ptr + s), tl.load(top_p_ptr + s), tl.load(min_p_ptr + s)
        by_k, by_p, by_min = filters(top_k, top_p, min_p, V)
        if not (by_k | by_p | by_min):
            score = chunk_score + lower
            token = tl.min(tl.where(score == tl.max(score, axis=0), chunk_id, V - 1), axis=0)
        else:
            lane = tl.arange(0, BLOCK)
            row_ptr = logits_ptr + s.to(tl.int64) * ROW
            row_bits = row_bits_of(tl.load(seed_ptr + s), tl.load(sample_index_ptr + s))
            mass = tl.sum(chunk_score * tl.exp(lower), axis=0)
            # The cut, in logits: at or below the threshold of every filter that is on.
            off_cut = tl.log(tl.where(by_min, min_p, 1.0))
            if by_p & (not (by_k | by_min)):
                off_cut = tl.log((1.0 - top_p) * mass / V) - 0.1  # even all of them weigh less than 1 - p together
            cut = (off_cut + top - 0.00001 * (tl.abs(off_cut) + tl.abs(top))) * temperature
            cut = tl.where(by_min | by_p & (not by_k), cut, float("-inf"))
            least = tl.zeros([], tl.uint32)
            if by_k & (top_k <= GROUPS // 2):
                groups_ptr = group_top_ptr + s.to(tl.int64) * GROUPS
                beyond = _key(top_logit, SHIFT) + 1
                reach = _search(groups_ptr, GROUPS, top_k, least, beyond, False, top_logit, 1.0, 1, SHIFT, GROUPS)
                # Where most of a row is banned, so are the groups, and the bound is -inf (or a NaN below it): what is
                # not banned then has room among the candidates.
                bound = _from_key(reach, SHIFT)
                cut = tl.maximum(cut, tl.where(bound > _LEAST, bound, _LEAST))

            depth = tl.zeros([], tl.int32) + DEPTH + 1
            candidates_ptr = candidate_ptr + s.to(tl.int64) * (DEPTH * BLOCK)
            tiles_ptr = candidate_tile_ptr + s.to(tl.int64) * (DEPTH * BLOCK)
            if cut > float("-inf"):
                used = tl.zeros([BLOCK], tl.int32)
                for tile in range(0, (V + BLOCK - 1) // BLOCK, 4):  # four loads in flight
                    x0 = logits_at(row_ptr, tile * BLOCK + lane, V, COL)
                    x1 = logits_at(row_ptr, (tile + 1) * BLOCK + lane, V, COL)
                    x2 = logits_at(row_ptr, (tile + 2) * BLOCK + lane, V, COL)
                    x3 = logits_at(row_ptr, (tile + 3) * BLOCK + lane, V, COL)
                    used = _collect(x0, tile, cut, used, candidates_ptr, tiles_ptr, DEPTH, BLOCK)
                    used = _collect(x1, tile + 1, cut, used, candidates_ptr, tiles_ptr, DEPTH, BLOCK)
                    used = _collect(x2, tile + 2, cut, used, candidates_ptr, tiles_ptr, DEPTH, BLOCK)
                    used = _collect(x3, tile + 3, cut, used, candidates_ptr, tiles_ptr, DEPTH, BLOCK)
                least = _key(cut, SHIFT)
                depth = tl.max(used, axis=0)
                for d in range(tl.minimum(depth, DEPTH)):
                    hole = tl.full([BLOCK], float("-inf"), tl.float32).to(candidate_ptr.dtype.element_ty)
                    tl.store(candidates_ptr + d * BLOCK + lane, hole, mask=used <= d)
                    tl.store(tiles_ptr + d * BLOCK + lane, tl.zeros([BLOCK], tl.int16), mask=used <= d)
                tl.debug_barrier()
            if depth <= DEPTH:
                token = _draw(
                    candidates_ptr, tiles_ptr, depth * BLOCK, least, temperature, top_logit, row_bits,
                    top_k, top_p, min_p, mass, V, 1, True, SHIFT, BLOCK,
                )  # fmt: skip
            else:
                token = _draw(
                    row_ptr, tiles_ptr, V, least, temperature, top_logit, row_bits,
                    top_k, top_p, min_p, mass, V, COL, False, SHIFT, BLOCK,
                )  # fmt: skip
    if FILTERED:
        filtered = is_filtered(temperature_ptr + s, top_k_ptr + s, top_p_ptr + s, min_p_ptr + s, V)
        tl.store(out_ptr + s, token, mask=filtered)
    else:
        tl.store(out_ptr + s, token)


def chunks_of(S: object, V: int) -> int:
    """Programs per row of the scan: enough of them for the whole chip and not many without a tile, a power of two of at
    most 64."""
    wanted = _PROGRAMS // max(S, 1) if isinstance(S, int) else 4
    tiles = -(-V // BLOCK)
    return min(1 << max(0, min(wanted, 64).bit_length() - 1), max(2, 1 << (tiles - 1).bit_length()))


def _configs(site: CallSite) -> list[dict[str, bool]]:
    return [{"alike": True}] if site.deterministic else [{}]


def _supports(site: CallSite) -> bool:
    logits = site.args["logits_SV"]
    return logits.dtype in KEY_SHIFT and logits.shape[1] < BLOCK * 2**15


@sample.impl("triton_sample", device="cuda", supports=_supports, configs=_configs, row_order=each_alone)
def triton_sample(logits_SV: Tensor, sampling: Sampling, *, alike: bool = False) -> Tensor:
    """Two launches, whatever the rows ask for. alike: each row is drawn in the same way among any others. One row then
    has as many chunks as several, and sums of a row are over float32, as they are in steps with edited logits:
    threads hold other elements of a tile where these are of 16 bits, and so add in another order."""
    chunks = None
    if alike:
        logits_SV, chunks = logits_SV.float(), chunks_of(None, logits_SV.shape[1])
    out_S = torch.empty(logits_SV.shape[0], dtype=torch.int32, device=logits_SV.device)
    launch_sample(logits_SV, sampling, out_S, chunks=chunks)
    return out_S


def launch_sample(
    logits_SV: Tensor, sampling: Sampling, out_S: Tensor, filtered: bool = False, chunks: int | None = None
) -> None:
    """The tokens into ``out_S``; with ``filtered`` only for rows with top-k, top-p or min-p, and nothing else is read.
    chunks: programs per row of the scan, as `chunks_of` says if not given."""
    S, V = logits_SV.shape
    chunks = chunks or chunks_of(S, V)

    def scratch(*shape: object, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_SV.device)  # type: ignore[arg-type]

    row = (logits_SV, *sampling)
    found = (scratch(S, chunks), scratch(S, chunks), scratch(S, chunks, dtype=torch.int32), scratch(S, _GROUPS))
    candidates = scratch(S, _DEPTH, BLOCK, dtype=logits_SV.dtype)
    tiles = scratch(S, _DEPTH, BLOCK, dtype=torch.int16)
    sizes = {
        "V": V, "ROW": logits_SV.stride(0), "COL": logits_SV.stride(1),
        "CHUNKS": chunks, "GROUPS": _GROUPS, "FILTERED": filtered, "BLOCK": BLOCK,
    }  # fmt: skip
    launch_triton(_scan_kernel, (chunks, S), *row, *found, **sizes, num_warps=8)
    launch_triton(
        _finish_kernel, (S,), *row, *found, candidates, tiles, out_S,
        SHIFT=KEY_SHIFT[logits_SV.dtype], DEPTH=_DEPTH, **sizes, num_warps=16,
    )  # fmt: skip
