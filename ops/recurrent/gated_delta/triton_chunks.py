"""gated_delta for prompts on a GPU with decays of heads, in chunks of 64 tokens.

With g_i the sum of a chunk's gates up to token i and S the state before the chunk, the deltas D of all of its tokens
solve a triangular system:

    (I + A) D = beta (V - exp(g) K S^T),  A_ij = beta_i exp(g_i - g_j) k_i . k_j for i > j

`_solve_kernel` has a program for each chunk and head. It writes what does not depend on the state: (I + A)^-1
with beta, products of queries and keys with their decays, and a few factors of rows. `_carry_kernel` has a program for
rows of a head's state, and goes through the chunks. Lengths of keys and queries are factors of rows, so that products
are of the keys as they came. No exponent is positive. Few tokens go one by one (triton_gated_delta).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.recurrent.gated_delta import gluon_solve
from graphllm.ops.recurrent.gated_delta.op import gated_delta
from graphllm.ops.recurrent.gated_delta.triton_gated_delta import has_prompts, launch_tokens
from graphllm.ops.recurrent.gated_delta.triton_lengths import CHUNK, CHUNKED, find_sequence
from graphllm.ops.recurrent.slots import Slots, exporting

_LANES = 4  # programs that share the sequences of a head
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, acc, EMULATED: tl.constexpr):
    """acc + a @ b in float32. Triton's interpreter (EMULATED) cannot multiply bfloat16."""
    if EMULATED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def narrow(x, EMULATED: tl.constexpr):
    """As a factor of a product. The interpreter would cut, not round."""
    return x if EMULATED else x.to(tl.bfloat16)


@triton.jit
def inverse_of(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [64, 64]: row by row in the blocks of 16 on the diagonal; with those
    as D, and L as what is below them, by (I + D L)^-1 D, where D L is nilpotent."""
    b = tl.arange(0, 4)
    r = tl.arange(0, 16)
    i = tl.arange(0, 64)
    same = (b[:, None] == b[None, :])[:, :, None, None]
    blocks = tl.permute(tl.reshape(A, [4, 16, 4, 16]), (0, 2, 1, 3))
    below = tl.sum(tl.where(same, blocks, 0.0), 1)
    D = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, below * 0.0)
    for n in tl.static_range(15):
        column = tl.sum(tl.where((r == n)[None, None, :], below, 0.0), 2)
        row = tl.sum(tl.where((r == n)[None, :, None], D, 0.0), 1)
        D -= column[:, :, None] * row[:, None, :]
    D = tl.reshape(tl.permute(tl.where(same, D[:, None, :, :], 0.0), (0, 2, 1, 3)), [64, 64])
    L = tl.where((i // 16)[:, None] > (i // 16)[None, :], A, 0.0)
    N = tl.dot(D, L, input_precision=PRECISION)
    some = D - tl.dot(N, D, input_precision=PRECISION)
    return some + tl.dot(tl.dot(N, N, input_precision=PRECISION), some, input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=["S"])
def _solve_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, start_ptr, inverse_ptr, seen_ptr, factor_ptr, scale, norm_eps, S,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, G_ROW: tl.constexpr,
    G_HEAD: tl.constexpr, BETA_ROW: tl.constexpr, BETA_HEAD: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, NORM: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_S: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    s, before = find_sequence(start_ptr, chunk, S, CHUNKED, "chunks", BLOCK_S)
    if s < S:
        i = tl.arange(0, CHUNK)
        e = tl.arange(0, K_PAD)
        t = tl.load(start_ptr + s) + (chunk - before) * CHUNK + i
        valid = t < tl.load(start_ptr + s + 1)
        t = t.to(tl.int64)
        inside = valid[:, None] & (e < K)[None, :]
        key_head = head // SHARE
        k = tl.load(k_ptr + (t * K_ROW)[:, None] + key_head * K_HEAD + e[None, :], mask=inside, other=0.0)
        q = tl.load(q_ptr + (t * Q_ROW)[:, None] + key_head * Q_HEAD + e[None, :], mask=inside, other=0.0)
        of_k = tl.full([CHUNK], 1.0, tl.float32)
        of_q = of_k * scale
        if NORM:
            wide = k.to(tl.float32)
            of_k = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) + norm_eps)
            wide = q.to(tl.float32)
            of_q = scale / tl.sqrt_rn(tl.sum(wide * wide, 1) + norm_eps)
        places = i[:, None] * CHUNK + i[None, :]
        gate = tl.load(g_ptr + t * G_ROW + head * G_HEAD, mask=valid, other=0.0).to(tl.float32) * _LOG2E
        beta = tl.load(beta_ptr + t * BETA_ROW + head * BETA_HEAD, mask=valid, other=0.0).to(tl.float32)
        total = tl.cumsum(gate, 0)
        decay = tl.exp2(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))
        at = (chunk * H + head).to(tl.int64)
        square = at * (CHUNK * CHUNK) + places
        zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
        seen = product(q, tl.trans(k), zeros, EMULATED) * decay * (of_q[:, None] * of_k[None, :])
        tl.store(seen_ptr + square, seen.to(seen_ptr.dtype.element_ty))
        A = product(k, tl.trans(k), zeros, EMULATED) * decay * ((beta * of_k)[:, None] * of_k[None, :])
        inverse = inverse_of(tl.where(i[:, None] > i[None, :], A, 0.0), "ieee" if EMULATED else "tf32") * beta[None, :]
        tl.store(inverse_ptr + square, inverse.to(inverse_ptr.dtype.element_ty))
        row = factor_ptr + at * (4 * CHUNK) + i
        grown = tl.exp2(total)
        last = tl.sum(gate, 0)
        tl.store(row, grown * of_k)
        tl.store(row + CHUNK, grown * of_q)
        tl.store(row + 2 * CHUNK, tl.exp2(tl.minimum(last - total, 0.0)) * of_k)
        tl.store(row + 3 * CHUNK, tl.exp2(last) + tl.zeros([CHUNK], tl.float32))


@triton.jit
def _factors(factor_ptr, at):
    """Of a chunk's rows, for keys, queries and deltas, and what the state before it is multiplied by."""
    row = factor_ptr + at.to(tl.int64) * (4 * CHUNK)
    i = tl.arange(0, CHUNK)
    return tl.load(row + i), tl.load(row + CHUNK + i), tl.load(row + 2 * CHUNK + i), tl.load(row + 3 * CHUNK)


@triton.jit
def _advance(state, k, q, v, inverse, seen, of_k, of_q, of_delta, of_state, EMULATED: tl.constexpr):
    """The state after a chunk, and what it answers."""
    held = narrow(state, EMULATED)
    zeros = tl.zeros([CHUNK, state.shape[1]], tl.float32)
    known = product(k, held, zeros, EMULATED) * of_k[:, None]
    unknown = narrow(v.to(tl.float32) - known, EMULATED)
    delta = product(inverse, unknown, zeros, EMULATED)
    state = product(tl.trans(k), narrow(delta * of_delta[:, None], EMULATED), state * of_state, EMULATED)
    answer = product(q, held, zeros, EMULATED) * of_q[:, None]
    return state, product(seen, narrow(delta, EMULATED), answer, EMULATED)


@triton.jit(do_not_specialize_on_alignment=["S", "T", "CHUNKS"])
def _carry_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, export_ptr, inverse_ptr, seen_ptr,
    factor_ptr, S, T, CHUNKS, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, SLOT: tl.constexpr, VERSION: tl.constexpr, VERSIONS: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_S: tl.constexpr, EXPORTS: tl.constexpr, TMA: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    row0 = tl.program_id(0) % BLOCKS * BLOCK_V
    rows = row0 + tl.arange(0, BLOCK_V)
    key_head = head // SHARE
    i = tl.arange(0, CHUNK)
    e = tl.arange(0, K_PAD)
    places = i[:, None] * CHUNK + i[None, :]
    in_state = (e < K)[:, None] & (rows < V)[None, :]
    k_places = i[:, None] * K_ROW + e[None, :]
    q_places = i[:, None] * Q_ROW + e[None, :]
    v_places = i[:, None] * V_ROW + rows[None, :]
    out_places = i[:, None] * (H * V) + rows[None, :]
    k_ptr += key_head * K_HEAD
    q_ptr += key_head * Q_HEAD
    v_ptr += head * V_HEAD
    out_ptr += head * V
    if TMA:
        k_tiles = tl.make_tensor_descriptor(k_ptr, [T, K], [K_ROW, 1], [CHUNK, K_PAD])
        q_tiles = tl.make_tensor_descriptor(q_ptr, [T, K], [Q_ROW, 1], [CHUNK, K_PAD])
        v_tiles = tl.make_tensor_descriptor(v_ptr, [T, V], [V_ROW, 1], [CHUNK, BLOCK_V])
        squares = CHUNKS * H * CHUNK
        inverses = tl.make_tensor_descriptor(inverse_ptr, [squares, CHUNK], [CHUNK, 1], [CHUNK, CHUNK])
        seens = tl.make_tensor_descriptor(seen_ptr, [squares, CHUNK], [CHUNK, 1], [CHUNK, CHUNK])
    rank = tl.program_id(1)
    s, before = find_sequence(start_ptr, rank, S, CHUNKED, "long", BLOCK_S)
    while s < S:
        first = tl.load(start_ptr + s)
        end = tl.load(start_ptr + s + 1)
        in_entry = (head * V + rows)[None, :] * K + e[:, None]
        entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT + in_entry
        state = tl.load(entry + tl.load(version_ptr + s).to(tl.int64) * VERSION, mask=in_state, other=0.0)
        state = state.to(tl.float32)
        whole = (end - first) // CHUNK
        border = -1  # the chunk before which the state is exported
        export = tl.zeros([], tl.int64)
        if EXPORTS:
            export += tl.load(export_ptr + s)
            whole = (end - first - 1) // CHUNK
            border = tl.where((export >= 0) & (whole > 0), whole, -1)
        last = tl.cdiv(end - first, CHUNK) - 1
        of_k, of_q, of_delta, of_state = _factors(factor_ptr, before * H + head)
        if TMA:
            for chunk in range(whole):
                t = first + chunk * CHUNK
                at = (before + chunk) * H + head
                next_k, next_q, next_delta, next_state = _factors(
                    factor_ptr, (before + tl.minimum(chunk + 1, last)) * H + head
                )
                state, answer = _advance(
                    state, k_tiles.load([t, 0]), q_tiles.load([t, 0]), v_tiles.load([t, row0]),
                    inverses.load([at * CHUNK, 0]), seens.load([at * CHUNK, 0]),
                    of_k, of_q, of_delta, of_state, EMULATED,
                )  # fmt: skip
                of_k, of_q, of_delta, of_state = next_k, next_q, next_delta, next_state
                to = out_ptr + t.to(tl.int64) * (H * V) + out_places
                tl.store(to, answer.to(out_ptr.dtype.element_ty), mask=(rows < V)[None, :])
        STAGES: tl.constexpr = 1 if TMA else None  # the last tokens, or all chunks
        for chunk in tl.range(whole if TMA else 0, tl.cdiv(end - first, CHUNK), num_stages=STAGES):
            if EXPORTS:  # noqa: SIM102
                if chunk == border:
                    tl.store(state_ptr + export * SLOT + in_entry, state.to(state_ptr.dtype.element_ty), mask=in_state)
            t = first + chunk * CHUNK
            valid = i < end - t
            t = t.to(tl.int64)
            in_keys = valid[:, None] & (e < K)[None, :]
            in_values = valid[:, None] & (rows < V)[None, :]
            at = ((before + chunk) * H + head).to(tl.int64)
            square = at * (CHUNK * CHUNK) + places
            k = tl.load(k_ptr + t * K_ROW + k_places, mask=in_keys, other=0.0)
            q = tl.load(q_ptr + t * Q_ROW + q_places, mask=in_keys, other=0.0)
            v = tl.load(v_ptr + t * V_ROW + v_places, mask=in_values, other=0.0)
            inverse, seen = tl.load(inverse_ptr + square), tl.load(seen_ptr + square)
            next_k, next_q, next_delta, next_state = _factors(
                factor_ptr, (before + tl.minimum(chunk + 1, last)) * H + head
            )
            state, answer = _advance(state, k, q, v, inverse, seen, of_k, of_q, of_delta, of_state, EMULATED)
            of_k, of_q, of_delta, of_state = next_k, next_q, next_delta, next_state
            to = out_ptr + t * (H * V) + out_places
            tl.store(to, answer.to(out_ptr.dtype.element_ty), mask=in_values)
        tl.store(entry + (VERSIONS - 1) * VERSION, state.to(state_ptr.dtype.element_ty), mask=in_state)
        rank += tl.num_programs(1)
        s, before = find_sequence(start_ptr, rank, S, CHUNKED, "long", BLOCK_S)


@triton.jit
def _advance_rows(state, k, q, v, inverse, seen, of_k, of_q, of_delta, of_state, EMULATED: tl.constexpr):
    """The state [V, K] after a chunk, and what it answers [V, 64]: results stay in registers as the next product's
    left factor."""
    held = narrow(state, EMULATED)
    zeros = tl.zeros([state.shape[0], CHUNK], tl.float32)
    known = product(held, tl.trans(k), zeros, EMULATED) * of_k[None, :]
    unknown = narrow(tl.trans(v).to(tl.float32) - known, EMULATED)
    delta = product(unknown, tl.trans(inverse), zeros, EMULATED)
    state = product(narrow(delta * of_delta[None, :], EMULATED), k, state * of_state, EMULATED)
    answer = product(held, tl.trans(q), zeros, EMULATED) * of_q[None, :]
    return state, product(narrow(delta, EMULATED), tl.trans(seen), answer, EMULATED)


@triton.jit(do_not_specialize_on_alignment=["S", "T", "CHUNKS"])
def _carry_rows_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, export_ptr, inverse_ptr, seen_ptr,
    factor_ptr, S, T, CHUNKS, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, SLOT: tl.constexpr, VERSION: tl.constexpr, VERSIONS: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_S: tl.constexpr, EXPORTS: tl.constexpr, TMA: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    row0 = tl.program_id(0) % BLOCKS * BLOCK_V
    rows = row0 + tl.arange(0, BLOCK_V)
    key_head = head // SHARE
    i = tl.arange(0, CHUNK)
    e = tl.arange(0, K_PAD)
    places = i[:, None] * CHUNK + i[None, :]
    in_state = (rows < V)[:, None] & (e < K)[None, :]
    k_places = i[:, None] * K_ROW + e[None, :]
    q_places = i[:, None] * Q_ROW + e[None, :]
    v_places = i[:, None] * V_ROW + rows[None, :]
    out_places = i[:, None] * (H * V) + rows[None, :]
    k_ptr += key_head * K_HEAD
    q_ptr += key_head * Q_HEAD
    v_ptr += head * V_HEAD
    out_ptr += head * V
    if TMA:
        k_tiles = tl.make_tensor_descriptor(k_ptr, [T, K], [K_ROW, 1], [CHUNK, K_PAD])
        q_tiles = tl.make_tensor_descriptor(q_ptr, [T, K], [Q_ROW, 1], [CHUNK, K_PAD])
        v_tiles = tl.make_tensor_descriptor(v_ptr, [T, V], [V_ROW, 1], [CHUNK, BLOCK_V])
        squares = CHUNKS * H * CHUNK
        inverses = tl.make_tensor_descriptor(inverse_ptr, [squares, CHUNK], [CHUNK, 1], [CHUNK, CHUNK])
        seens = tl.make_tensor_descriptor(seen_ptr, [squares, CHUNK], [CHUNK, 1], [CHUNK, CHUNK])
    rank = tl.program_id(1)
    s, before = find_sequence(start_ptr, rank, S, CHUNKED, "long", BLOCK_S)
    while s < S:
        first = tl.load(start_ptr + s)
        end = tl.load(start_ptr + s + 1)
        in_entry = (head * V + rows)[:, None] * K + e[None, :]
        entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT + in_entry
        state = tl.load(entry + tl.load(version_ptr + s).to(tl.int64) * VERSION, mask=in_state, other=0.0)
        state = state.to(tl.float32)
        whole = (end - first) // CHUNK
        border = -1  # the chunk before which the state is exported
        export = tl.zeros([], tl.int64)
        if EXPORTS:
            export += tl.load(export_ptr + s)
            whole = (end - first - 1) // CHUNK
            border = tl.where((export >= 0) & (whole > 0), whole, -1)
        last = tl.cdiv(end - first, CHUNK) - 1
        start = factor_ptr + (before * H + head).to(tl.int64) * (4 * CHUNK)
        of_state = tl.load(start + 3 * CHUNK)
        of_q = tl.load(start + CHUNK + i)
        if TMA:
            for chunk in range(whole):
                t = first + chunk * CHUNK
                at = (before + chunk) * H + head
                after = ((before + tl.minimum(chunk + 1, last)) * H + head).to(tl.int64)
                next_state = tl.load(factor_ptr + after * (4 * CHUNK) + 3 * CHUNK)
                next_q = tl.load(factor_ptr + after * (4 * CHUNK) + CHUNK + i)
                row = factor_ptr + at.to(tl.int64) * (4 * CHUNK) + i
                state, answer = _advance_rows(
                    state, k_tiles.load([t, 0]), q_tiles.load([t, 0]), v_tiles.load([t, row0]),
                    inverses.load([at * CHUNK, 0]), seens.load([at * CHUNK, 0]),
                    tl.load(row), of_q, tl.load(row + 2 * CHUNK), of_state, EMULATED,
                )  # fmt: skip
                of_state, of_q = next_state, next_q
                to = out_ptr + t.to(tl.int64) * (H * V) + out_places
                tl.store(to, tl.trans(answer).to(out_ptr.dtype.element_ty), mask=(rows < V)[None, :])
        STAGES: tl.constexpr = 1 if TMA else None  # the last tokens, or all chunks
        for chunk in tl.range(whole if TMA else 0, tl.cdiv(end - first, CHUNK), num_stages=STAGES):
            if EXPORTS:  # noqa: SIM102
                if chunk == border:
                    tl.store(state_ptr + export * SLOT + in_entry, state.to(state_ptr.dtype.element_ty), mask=in_state)
            t = first + chunk * CHUNK
            valid = i < end - t
            t = t.to(tl.int64)
            in_keys = valid[:, None] & (e < K)[None, :]
            in_values = valid[:, None] & (rows < V)[None, :]
            at = ((before + chunk) * H + head).to(tl.int64)
            square = at * (CHUNK * CHUNK) + places
            k = tl.load(k_ptr + t * K_ROW + k_places, mask=in_keys, other=0.0)
            q = tl.load(q_ptr + t * Q_ROW + q_places, mask=in_keys, other=0.0)
            v = tl.load(v_ptr + t * V_ROW + v_places, mask=in_values, other=0.0)
            inverse, seen = tl.load(inverse_ptr + square), tl.load(seen_ptr + square)
            after = ((before + tl.minimum(chunk + 1, last)) * H + head).to(tl.int64)
            next_state = tl.load(factor_ptr + after * (4 * CHUNK) + 3 * CHUNK)
            next_q = tl.load(factor_ptr + after * (4 * CHUNK) + CHUNK + i)
            row = factor_ptr + at * (4 * CHUNK) + i
            state, answer = _advance_rows(
                state,
                k,
                q,
                v,
                inverse,
                seen,
                tl.load(row),
                of_q,
                tl.load(row + 2 * CHUNK),
                of_state,
                EMULATED,
            )
            of_state, of_q = next_state, next_q
            to = out_ptr + t * (H * V) + out_places
            tl.store(to, tl.trans(answer).to(out_ptr.dtype.element_ty), mask=in_values)
        tl.store(entry + (VERSIONS - 1) * VERSION, state.to(state_ptr.dtype.element_ty), mask=in_state)
        rank += tl.num_programs(1)
        s, before = find_sequence(start_ptr, rank, S, CHUNKED, "long", BLOCK_S)


def launch_solve(
    q_TGK: Tensor, k_TGK: Tensor, g_TH: Tensor, beta_TH: Tensor, starts: Tensor, scale: float, norm_eps: float,
    chunked: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What of chunks does not depend on states, for sequences of at least ``chunked`` tokens: inverses and products of
    queries and keys [chunks, H, 64, 64], and factors of rows [chunks, H, 4, 64]."""
    (T, G, K), H = q_TGK.shape, g_TH.shape[1]
    emulated = triton.knobs.runtime.interpret
    chunks = (T + CHUNKED - 1) // CHUNKED  # a sequence of n tokens has at most n / CHUNKED
    dtype = torch.float32 if emulated else q_TGK.dtype
    inverse, seen = (q_TGK.new_empty((chunks, H, 64, 64), dtype=dtype) for _ in range(2))
    factors = q_TGK.new_empty((chunks, H, 4, 64), dtype=torch.float32)
    tensors = {"Q": q_TGK, "K": k_TGK, "G": g_TH, "BETA": beta_TH}
    launch_triton(
        _solve_kernel, (chunks * H,),
        q_TGK, k_TGK, g_TH, beta_TH, starts, inverse, seen, factors, scale, norm_eps, starts.shape[0] - 1,
        **{f"{n}_{of}": t.stride(i) for n, t in tensors.items() for i, of in enumerate(("ROW", "HEAD"))},
        H=H, SHARE=H // G, K=K, K_PAD=max(16, triton.next_power_of_2(K)), NORM=norm_eps > 0,
        CHUNKED=chunked, BLOCK_S=256, EMULATED=emulated, num_warps=4,
        maxnreg=168,  # so that three programs fit a processor: a fifth faster
    )  # fmt: skip
    return inverse, seen, factors


def launch_carry(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, state: Tensor, at: Slots, out_THV: Tensor,
    solved: tuple[Tensor, Tensor, Tensor], chunked: int, block_v: int, turned: bool, exports: Tensor | None = None,
) -> None:  # fmt: skip
    """States of sequences of at least ``chunked`` tokens, and what they answer.

    block_v: rows of a state that a program has.
    turned: by the kernel whose products have these rows last.
    """
    versions, H, V, K = state.shape[1:]
    tensors = {"Q": q_TGK, "K": k_TGK, "V": v_THV}
    launch_triton(
        _carry_rows_kernel if turned else _carry_kernel, (H * ((V + block_v - 1) // block_v), _LANES),
        q_TGK, k_TGK, v_THV, state, out_THV, *at, at.slots if exports is None else exports, *solved, at.slots.shape[0],
        q_TGK.shape[0], solved[0].shape[0],
        **{f"{n}_{of}": t.stride(i) for n, t in tensors.items() for i, of in enumerate(("ROW", "HEAD"))},
        SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=versions, H=H, SHARE=H // q_TGK.shape[1], K=K, V=V,
        K_PAD=max(16, triton.next_power_of_2(K)), BLOCK_V=block_v, CHUNKED=chunked, BLOCK_S=256,
        EXPORTS=exports is not None, TMA=turned, EMULATED=triton.knobs.runtime.interpret, num_warps=4, num_stages=3,
    )  # fmt: skip


def _by_copies(site: CallSite) -> bool:
    """Whether the copy engine takes rows of queries, keys and values: 16 bytes at multiples of 16."""
    rows = [site.args[name] for name in ("q_TGK", "k_TGK", "v_THV")]
    return all(number % 8 == 0 for t in rows for number in (t.storage_offset(), *t.stride()[:2]))


def _configs(site: CallSite) -> list[dict[str, int]]:
    """Rows of a state that a program has, and whether products are turned, which takes rows of whole chunks by the copy
    engine: what ran on an H200 beside float64 (bench/notes/recurrent.md). gluon: whether `gluon_solve` comes first."""
    gluon = int(gluon_solve.solves(site))
    turned = [{"block_v": 64, "turned": 1, "gluon": gluon}] if _by_copies(site) else []
    return [{"block_v": 32, "turned": 0, "gluon": gluon}, *turned]


def _supports(site: CallSite) -> bool:
    return site.args["g"].dim() == 2 and has_prompts(site)


@gated_delta.impl("triton_chunks", device="cuda", supports=_supports, configs=_configs)
@exporting
def triton_chunks(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor, at: Slots, scale: float,
    norm_eps: float, exports: Tensor | None, *, block_v: int, turned: int, gluon: int = 0,
) -> Tensor:  # fmt: skip
    """Sequences of many tokens by chunks, in two launches, and the others token by token in a third."""
    out_THV = v_THV.new_empty(v_THV.shape)
    chunked = max(CHUNKED, state.shape[1] + 1)  # at most as many tokens as versions: each one's state is kept
    solve = gluon_solve.launch_solve if gluon else launch_solve
    solved = solve(q_TGK, k_TGK, g, beta_TH, at.query_start_loc, scale, norm_eps, chunked)
    launch_carry(q_TGK, k_TGK, v_THV, state, at, out_THV, solved, chunked, block_v, turned > 0, exports)
    launch_tokens(q_TGK, k_TGK, v_THV, g, beta_TH, state, at, out_THV, scale, norm_eps, below=chunked)
    return out_THV
