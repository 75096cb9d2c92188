"""What the Triton kernels of attention share: where a tile's tokens lie in the cache, heads that are normalized and
rotated on the way in, scores, and which sites the kernels serve."""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.paged_attention.operands import Rotary


@triton.jit
def soft_cap(scores, LOG2E_CAP: tl.constexpr, score_scale):
    """LOG2E_CAP * tanh(scores * score_scale), with an exponential that cannot overflow."""
    t = tl.exp2(tl.abs(scores) * (score_scale * -2.8853900817779268))
    capped = LOG2E_CAP * (1 - t) / (1 + t)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def tile_tokens(BLOCK_N: tl.constexpr, HEADS: tl.constexpr):
    """The token of each column of a tile: that of the first head's columns, then the same for each further head."""
    if HEADS == 1:
        return tl.arange(0, BLOCK_N)
    else:
        return tl.arange(0, BLOCK_N) % (BLOCK_N // HEADS)


@triton.jit
def tile_blocks(table_row, tile, end, P: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr = 1):
    """The cache block of each column of a tile, 0 from position end on.

    Loops read the next tile's block ids one iteration ahead: Triton's pipeliner then keeps several tiles of keys in
    flight, while keys that depend on a load of the same iteration would be fetched one tile at a time.
    """
    TOKENS: tl.constexpr = BLOCK_N // HEADS
    n = tile_tokens(BLOCK_N, HEADS)
    at = tile * TOKENS + n
    if P <= TOKENS:
        return tl.load(table_row + (tile * (TOKENS // P) + n // P), mask=at < end, other=0)
    else:
        return tl.load(table_row + at // P, mask=at < end, other=0)


@triton.jit
def tile_slots(
    cache_block, tile, CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    CACHE_HEAD: tl.constexpr = 0, HEADS: tl.constexpr = 1,
):  # fmt: skip
    """Offsets of a tile's columns in the cache, from that of its first head."""
    TOKENS: tl.constexpr = BLOCK_N // HEADS
    n = tile_tokens(BLOCK_N, HEADS)
    if P > TOKENS:
        n = (tile * TOKENS) % P + n
    slots = cache_block.to(tl.int64) * CACHE_BLOCK + (n % P) * CACHE_POS
    if HEADS > 1:
        slots += (tl.arange(0, BLOCK_N) // TOKENS) * CACHE_HEAD
    return slots


@triton.jit
def find_sequence(query_start_ptr, block, S, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sequence with a block of query tokens. Every sequence has room for one block that is not full."""
    s = -1
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        first_block = tl.load(query_start_ptr + i, mask=i < S, other=2147483647) // BLOCK_Q + i
        s += tl.sum(((first_block <= block) & (i < S)).to(tl.int32))
    return s


@triton.jit
def window_tiles(low, end, full, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of rows with positions low .. end: the first tile that one of them sees, and the first that all of them see whole
    (at most ``full``, the first that the causal mask cuts)."""
    first = tl.maximum(low - WINDOW + 1, 0) // BLOCK_N
    whole = tl.maximum(end - WINDOW, 0)  # first position that the last row sees
    return first, tl.maximum(tl.minimum((whole + BLOCK_N - 1) // BLOCK_N, full), first)


@triton.jit
def prefetch_lines(slots, CACHE_KV: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """Ask for keys and values of slots, LINES of LINE entries each, to be brought to the L2 cache."""
    line = slots[:, None] + (tl.arange(0, LINES) * LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(line + CACHE_KV).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def multiply(a, b, acc, EMULATED: tl.constexpr):
    """acc + a @ b in float32. Triton's interpreter (EMULATED) cannot multiply bfloat16."""
    if EMULATED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def scores_of(q, keys, row_scale, LOG2E_CAP: tl.constexpr, EMULATED: tl.constexpr):
    """Scores of rows [M] and keys [N], in units of log2."""
    scores = multiply(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32), EMULATED)
    if LOG2E_CAP > 0:
        return soft_cap(scores, LOG2E_CAP, row_scale)
    else:
        return scores * row_scale


@triton.jit
def plus_tile(scores, values, top, total, acc, BLIND: tl.constexpr, EMULATED: tl.constexpr):
    """The running softmax with one more tile: largest scores, sums of weights, sums of values. BLIND: a row may have
    seen nothing yet."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = new_top
    if BLIND:
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - shift)
    p = tl.exp2(scores - shift[:, None])
    total = total * rescale + tl.sum(p, axis=1)
    return new_top, total, multiply(p.to(values.dtype), values, acc * rescale[:, None], EMULATED)


@triton.jit
def weights_of(scores, top, row_scale, LOG2E_CAP: tl.constexpr, BLIND: tl.constexpr):
    """Weights of a tile, the rows' new maxima, and what older sums are to be multiplied by. Scores are scaled here, but
    with a soft cap. BLIND: as for `plus_tile`."""
    if LOG2E_CAP > 0:
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = new_top
        if BLIND:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - shift[:, None])
    else:
        new_top = tl.maximum(top, tl.max(scores, axis=1) * row_scale)
        shift = new_top
        if BLIND:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores * row_scale[:, None] - shift[:, None])
    return p, new_top, tl.exp2(top - shift)


@triton.jit
def write_heads(
    acc, top, total, v_scale, sinks_ptr, out_ptr, row, heads, valid, e, inside,
    H: tl.constexpr, E: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The output of rows, with the sinks of their heads. e, inside: entries of a head [E_PAD], and where they exist in
    rows that are valid."""
    if SINKS:
        total += tl.exp2(load_sinks(sinks_ptr, heads, valid) - top)
    acc = acc * (v_scale / total)[:, None]
    out = out_ptr + ((row * H + heads) * E)[:, None] + e[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_scales(kv_scales_ptr, SCALED: tl.constexpr):
    """What the entries of keys and of values in the cache stand for."""
    if SCALED:
        return tl.load(kv_scales_ptr), tl.load(kv_scales_ptr + 1)
    else:
        return 1.0, 1.0


@triton.jit
def as_entries(rows, scale, dtype: tl.constexpr, SCALED: tl.constexpr, EMULATED: tl.constexpr):
    """Keys or values as a cache of that dtype holds them."""
    if dtype == tl.float8e4nv:
        rows = rows.to(tl.float32)
        if SCALED:
            rows = tl.div_rn(rows, scale)
        rows = tl.clamp(rows, -448.0, 448.0)
        if EMULATED:  # the interpreter cuts where a GPU rounds
            bits = rows.to(tl.int32, bitcast=True)
            whole = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
            part = (tl.abs(rows) + 16384.0) - 16384.0
            rows = tl.where(tl.abs(rows) >= 0.015625, whole, tl.where(rows < 0, -part, part))
        else:  # four in one piece: ptxas 12.8 loses some of the pairs that Triton makes
            entries = tl.inline_asm_elementwise(
                "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
                " mov.b32 $0, {a, b}; }", "=r,f,f,f,f", [rows], dtype=tl.int8, is_pure=True, pack=4,
            )  # fmt: skip
            return entries.to(dtype, bitcast=True)
    return rows.to(dtype)


@triton.jit
def as_queries(q, dtype: tl.constexpr):
    """Queries as they are multiplied with keys of a cache of that dtype, and what the products of each row are to be
    multiplied by. Entries of 8 bits become float16 by one instruction for two, bfloat16 by several slow ones; but
    float16 has not the range of bfloat16."""
    if dtype == tl.float8e4nv and q.dtype != tl.float32:
        wide = q.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
        power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        return (wide / power[:, None]).to(tl.float16), power
    else:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)


@triton.jit
def paired(e, F: tl.constexpr):
    """The entry with which `rope` combines entry e of a head."""
    return tl.where(e < F, e + F, tl.where(e < 2 * F, e - F, e))


@triton.jit
def load_norm(norm_ptr, E: tl.constexpr, E_PAD: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr):
    """Weights of a norm over heads, as they are and by `paired` entry."""
    if NORM:
        e = tl.arange(0, E_PAD)
        weight = tl.load(norm_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        other = tl.load(norm_ptr + paired(e, F), mask=e < E, other=0.0).to(tl.float32)
        return weight, other
    else:
        return 1.0, 1.0


@triton.jit
def load_heads(row_ptr, inside, E: tl.constexpr, E_PAD: tl.constexpr, F: tl.constexpr):
    """Heads [M, E_PAD] from pointers [M, 1], zeros where ``inside`` [M, 1] is not, and their `paired` entries."""
    e = tl.arange(0, E_PAD)
    mask = inside & (e < E)[None, :]
    heads = tl.load(row_ptr + e[None, :], mask=mask, other=0.0)
    if F > 0:
        return heads, tl.load(row_ptr + paired(e, F)[None, :], mask=mask, other=0.0)
    else:
        return heads, heads


@triton.jit
def load_angles(token, inside, cos_ptr, sin_ptr, E_PAD: tl.constexpr, F: tl.constexpr):
    """Cosines and sines [M or 1, E_PAD] of the tokens' rows; an angle of zero where nothing is rotated."""
    if F > 0:
        e = tl.arange(0, E_PAD)
        at = token * F + tl.where(e < F, e, e - F)[None, :]
        known = inside & (e < 2 * F)[None, :]
        cos = tl.load(cos_ptr + at, mask=known, other=1.0)
        sin = tl.load(sin_ptr + at, mask=known, other=0.0)
        return cos, tl.where((e < F)[None, :], -sin, sin)
    else:
        return 1.0, 0.0


@triton.jit
def rotate(
    heads, other, weight, other_weight, cos, sin,
    E: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Heads normalized and rotated as by `rms_norm` and `rope`, in their dtype, from what the functions above load."""
    dtype = heads.dtype
    if NORM or F > 0:
        x, y = heads.to(tl.float32), other.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, axis=1) / E + EPS)[:, None]
            x = ((x * scale).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
            y = ((y * scale).to(dtype).to(tl.float32) * other_weight[None, :]).to(dtype).to(tl.float32)
        if F > 0:
            x = x * cos.to(dtype).to(tl.float32) + y * sin.to(dtype).to(tl.float32)
        heads = x.to(dtype)
    return heads


@triton.jit
def load_rotated(
    row_ptr, token, inside, norm_ptr, cos_ptr, sin_ptr,
    E: tl.constexpr, E_PAD: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """All of it: heads [M, E_PAD] of pointers, tokens and ``inside`` [M, 1], ready for attention."""
    heads, other = load_heads(row_ptr, inside, E, E_PAD, F)
    weight, other_weight = load_norm(norm_ptr, E, E_PAD, F, NORM)
    cos, sin = load_angles(token, inside, cos_ptr, sin_ptr, E_PAD, F)
    return rotate(heads, other, weight, other_weight, cos, sin, E, F, NORM, EPS)


@triton.jit
def load_bits(ancestors_ptr, row, known, TREE: tl.constexpr):
    """Which rows of their step the rows see, a bit for each; all that come before where there is no tree."""
    if TREE:
        return tl.load(ancestors_ptr + row, mask=known, other=-1)
    else:
        return tl.full(row.shape, -1, tl.int64)


@triton.jit
def count_bits(bits, BLOCK: tl.constexpr):
    """How many of the first BLOCK bits are set."""
    return tl.sum((bits[:, None] >> tl.arange(0, BLOCK)[None, :].to(tl.int64)) & 1, axis=1).to(tl.int32)


@triton.jit
def load_sinks(sinks_ptr, heads, known):
    """Scores of the heads' sinks, in units of log2."""
    return tl.load(sinks_ptr + heads, mask=known, other=0.0).to(tl.float32) * 1.4426950408889634


def rotary_arguments(rotary: Rotary | None, unused: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """The kernels' pointers q_norm, k_norm, cos and sin, ``unused`` where there is nothing, and their constants."""
    cos, sin, q_norm, k_norm, eps = rotary or (None, None, None, None, 0.0)
    constants = {"F": 0 if cos is None else cos.shape[1], "NORM": q_norm is not None, "EPS": eps}
    return [unused if t is None else t for t in (q_norm, k_norm, cos, sin)], constants


def score_constants(scale: float, softcap: float) -> tuple[float, float]:
    """The kernels' SCALE and LOG2E_CAP: scores are kept in units of log2."""
    if softcap > 0:
        return scale / softcap, softcap * math.log2(math.e)
    return scale * math.log2(math.e), 0.0


def power_of_2(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n and ``least``: the padded size of a tile's dimension."""
    return max(least, 1 << (n - 1).bit_length())


def attends(site: CallSite) -> bool:
    """Whether the kernels of this folder compute the op at a site."""
    return not problem(site) and _rotates(site)


def _rotates(site: CallSite) -> bool:
    """Whether the kernels can read the tables of a rotation, if there is one."""
    tables = [t for n in ("cos_TF", "sin_TF") if (t := site.args[n]) is not None]
    norms = [t for n in ("q_norm_E", "k_norm_E") if (t := site.args[n]) is not None]
    same = all(n.dtype == site.args["q_THE"].dtype for n in norms)
    return same and all(t.dtype == torch.float32 and t.is_contiguous() for t in tables)


def problem(site: CallSite) -> str:
    """Why they do not, with what a user can do: dtype, head size or block size; empty where they do."""
    q, cache, table = site.args["q_THE"], site.args["kv_cache"], site.args["block_table"]
    P, E = cache.shape[3], cache.shape[4]
    if P % 16 or P & (P - 1):
        return f"block_size {P}: no attention kernel for a GPU takes it; use a power of two from 16"
    if E > 256:
        return f"head_dim {E}: no attention kernel for a GPU takes more than 256; use the backend eager"
    if cache.dtype == torch.int8:
        return "kv_cache_dtype int8: no attention kernel for a GPU takes it; use fp8"
    if cache.dtype == torch.float8_e4m3fn and site.target.arch[0] < "sm_89":
        return f"kv_cache_dtype fp8: {site.target.arch[0]} has no such numbers; use auto"
    if cache.dtype not in (q.dtype, torch.float8_e4m3fn) or any(
        site.args[n].dtype != q.dtype for n in ("k_TKE", "v_TKE")
    ):
        return f"a cache of {cache.dtype} for queries of {q.dtype}: attention kernels for a GPU take one dtype"
    sinks = site.args["sinks_H"]
    if sinks is not None and (sinks.dtype != q.dtype or not sinks.is_contiguous()):
        return f"sinks of {sinks.dtype} for queries of {q.dtype}: attention kernels for a GPU take one dtype"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or table.dtype != torch.int32:
        return f"dtype {q.dtype}: no attention kernel for a GPU takes it; use bfloat16, float16 or float32"
    return ""
