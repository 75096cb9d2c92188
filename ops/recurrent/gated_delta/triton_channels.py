"""gated_delta for prompts on a GPU with decays of each key channel, in chunks of 64 tokens.

With G_i the sums of a chunk's gates up to token i, one for each channel, and S the state before the chunk, the deltas D
of all of its tokens solve a triangular system:

    (I + A) D = beta (V - (exp(G) K) S^T),  A_ij = beta_i sum over channels of k_i k_j exp(G_i - G_j) for i > j

so D = U - W S^T. `_sums_kernel` writes G. `_solve_kernel` has a program for each chunk and head, and writes U, W and
what else does not depend on the state. `_carry_kernel` has a program for rows of a head's state, and goes through the
chunks.

exp(G_i - G_j) is no product of factors of i and j that all are small numbers. So A is computed in blocks that halve: of
the 64 tokens, then of both halves, and so on. The later half of a block sees the earlier one across a border; keys and
queries decay from the border, and keys up to it. No exponent is positive, whatever the gates are.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.recurrent.gated_delta.op import gated_delta
from graphllm.ops.recurrent.gated_delta.triton_chunks import inverse_of, narrow, product
from graphllm.ops.recurrent.gated_delta.triton_gated_delta import has_prompts, launch_tokens
from graphllm.ops.recurrent.gated_delta.triton_lengths import CHUNK, CHUNKED, find_sequence
from graphllm.ops.recurrent.slots import Slots

_LANES = 4  # programs that share the sequences of a head
_LOG2E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-64.0)  # of a gate, in powers of two: beyond float32, and sums of 64 have no large errors


@triton.jit(do_not_specialize_on_alignment=["S"])
def _sums_kernel(
    g_ptr, start_ptr, sum_ptr, decay_ptr, S, G_ROW: tl.constexpr, G_HEAD: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    s, before = find_sequence(start_ptr, chunk, S, CHUNKED, "chunks", BLOCK_S)
    if s < S:
        i = tl.arange(0, CHUNK)
        e = tl.arange(0, K_PAD)
        t = tl.load(start_ptr + s) + (chunk - before) * CHUNK + i
        inside = (t < tl.load(start_ptr + s + 1))[:, None] & (e < K)[None, :]
        gate = tl.load(g_ptr + (t.to(tl.int64) * G_ROW)[:, None] + head * G_HEAD + e[None, :], mask=inside, other=0.0)
        gate = tl.maximum(gate.to(tl.float32) * _LOG2E, _LEAST)
        at = (chunk * H + head).to(tl.int64)
        tl.store(sum_ptr + at * (CHUNK * K_PAD) + i[:, None] * K_PAD + e[None, :], tl.cumsum(gate, 0))
        tl.store(decay_ptr + at * K_PAD + e, tl.exp2(tl.sum(gate, 0)))


@triton.jit(do_not_specialize_on_alignment=["S"])
def _solve_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, start_ptr, sum_ptr, u_ptr, w_ptr, query_ptr, key_ptr, seen_ptr, scale, norm_eps, S,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, BETA_ROW: tl.constexpr, BETA_HEAD: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr, NORM: tl.constexpr,
    CHUNKED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    s, before = find_sequence(start_ptr, chunk, S, CHUNKED, "chunks", BLOCK_S)
    if s < S:
        i = tl.arange(0, CHUNK)
        n = tl.arange(0, V_PAD)
        t = tl.load(start_ptr + s) + (chunk - before) * CHUNK + i
        valid = t < tl.load(start_ptr + s + 1)
        t = t.to(tl.int64)
        at = (chunk * H + head).to(tl.int64)
        key_head = head // SHARE
        k_row = k_ptr + (t * K_ROW)[:, None] + key_head * K_HEAD
        q_row = q_ptr + (t * Q_ROW)[:, None] + key_head * Q_HEAD
        sums = sum_ptr + at * (CHUNK * K_PAD)
        zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
        A = zeros
        seen = zeros
        nothing = tl.zeros([CHUNK], tl.float32)
        of_k = nothing
        of_q = nothing
        diagonal = nothing
        for block in tl.range(K_PAD // BLOCK_K, num_stages=1):
            c = block * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = valid[:, None] & (c < K)[None, :]
            k = tl.load(k_row + c[None, :], mask=inside, other=0.0)
            q = tl.load(q_row + c[None, :], mask=inside, other=0.0)
            total = tl.load(sums + i[:, None] * K_PAD + c[None, :])
            of_k += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
            of_q += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
            diagonal += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
            for level in tl.range(6, num_stages=1):
                row = (i >> (level + 1) << (level + 1)) + (1 << level) - 1
                border = tl.load(sums + row[:, None] * K_PAD + c[None, :])
                near = tl.exp2(-tl.abs(total - border))
                keys = narrow(k.to(tl.float32) * near, EMULATED)
                queries = narrow(q.to(tl.float32) * near, EMULATED)
                later = (i >> level) % 2 == 1
                across = later[:, None] & ((i >> level)[:, None] == (i >> level)[None, :] + 1)
                A += tl.where(across, product(keys, tl.trans(keys), zeros, EMULATED), 0.0)
                seen += tl.where(across, product(queries, tl.trans(keys), zeros, EMULATED), 0.0)
        if NORM:
            of_k = 1.0 / tl.sqrt_rn(of_k + norm_eps)
            of_q = scale / tl.sqrt_rn(of_q + norm_eps)
        else:
            of_k = nothing + 1.0
            of_q = nothing + scale
        seen = tl.where(i[:, None] == i[None, :], diagonal[:, None], seen) * (of_q[:, None] * of_k[None, :])
        places = i[:, None] * CHUNK + i[None, :]
        tl.store(seen_ptr + at * (CHUNK * CHUNK) + places, seen.to(seen_ptr.dtype.element_ty))
        beta = tl.load(beta_ptr + t * BETA_ROW + head * BETA_HEAD, mask=valid, other=0.0).to(tl.float32)
        inverse = inverse_of(A * ((beta * of_k)[:, None] * of_k[None, :]), "ieee" if EMULATED else "tf32")
        inverse = narrow(inverse * beta[None, :], EMULATED)
        in_values = valid[:, None] & (n < V)[None, :]
        v = tl.load(v_ptr + (t * V_ROW)[:, None] + head * V_HEAD + n[None, :], mask=in_values, other=0.0)
        u = product(inverse, v, tl.zeros([CHUNK, V_PAD], tl.float32), EMULATED)
        tl.store(u_ptr + at * (CHUNK * V_PAD) + i[:, None] * V_PAD + n[None, :], u.to(u_ptr.dtype.element_ty))
        # Products of 32 columns whose left factor is in registers were wrong on an H200 (Triton 3.6).
        WIDE: tl.constexpr = min(K_PAD, 64)
        for block in tl.range(K_PAD // WIDE, num_stages=1):
            c = block * WIDE + tl.arange(0, WIDE)
            inside = valid[:, None] & (c < K)[None, :]
            of_block = at * (CHUNK * K_PAD) + i[:, None] * K_PAD + c[None, :]
            k = tl.load(k_row + c[None, :], mask=inside, other=0.0).to(tl.float32) * of_k[:, None]
            q = tl.load(q_row + c[None, :], mask=inside, other=0.0).to(tl.float32) * of_q[:, None]
            total = tl.load(sums + i[:, None] * K_PAD + c[None, :])
            last = tl.load(sums + (CHUNK - 1) * K_PAD + c)
            grown = tl.exp2(total)
            tl.store(query_ptr + of_block, (q * grown).to(query_ptr.dtype.element_ty))
            tl.store(key_ptr + of_block, (k * tl.exp2(last[None, :] - total)).to(key_ptr.dtype.element_ty))
            w = product(inverse, narrow(k * grown, EMULATED), tl.zeros([CHUNK, WIDE], tl.float32), EMULATED)
            tl.store(w_ptr + of_block, w.to(w_ptr.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["S"])
def _carry_kernel(
    state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, u_ptr, w_ptr, query_ptr, key_ptr, seen_ptr, decay_ptr, S,
    SLOT: tl.constexpr, VERSION: tl.constexpr, VERSIONS: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_V: tl.constexpr, CHUNKED: tl.constexpr,
    BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    rows = tl.program_id(0) % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, CHUNK)
    e = tl.arange(0, K_PAD)
    in_state = (e < K)[:, None] & (rows < V)[None, :]
    of_keys = i[:, None] * K_PAD + e[None, :]
    of_values = i[:, None] * V_PAD + rows[None, :]
    of_square = i[:, None] * CHUNK + i[None, :]
    rank = tl.program_id(1)
    s, before = find_sequence(start_ptr, rank, S, CHUNKED, "long", BLOCK_S)
    while s < S:
        first = tl.load(start_ptr + s)
        end = tl.load(start_ptr + s + 1)
        entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT + (head * V + rows)[None, :] * K + e[:, None]
        state = tl.load(entry + tl.load(version_ptr + s).to(tl.int64) * VERSION, mask=in_state, other=0.0)
        state = state.to(tl.float32)
        for chunk in range(tl.cdiv(end - first, CHUNK)):
            at = ((before + chunk) * H + head).to(tl.int64)
            w = tl.load(w_ptr + at * (CHUNK * K_PAD) + of_keys)
            q = tl.load(query_ptr + at * (CHUNK * K_PAD) + of_keys)
            k = tl.load(key_ptr + at * (CHUNK * K_PAD) + of_keys)
            u = tl.load(u_ptr + at * (CHUNK * V_PAD) + of_values)
            seen = tl.load(seen_ptr + at * (CHUNK * CHUNK) + of_square)
            decay = tl.load(decay_ptr + at * K_PAD + e)
            held = narrow(state, EMULATED)
            zeros = tl.zeros([CHUNK, BLOCK_V], tl.float32)
            delta = narrow(u.to(tl.float32) - product(w, held, zeros, EMULATED), EMULATED)
            state = product(tl.trans(k), delta, state * decay[:, None], EMULATED)
            answer = product(seen, delta, product(q, held, zeros, EMULATED), EMULATED)
            t = first + chunk * CHUNK
            to = out_ptr + t.to(tl.int64) * (H * V) + head * V + i[:, None] * (H * V) + rows[None, :]
            written = (i < end - t)[:, None] & (rows < V)[None, :]
            tl.store(to, answer.to(out_ptr.dtype.element_ty), mask=written)
        tl.store(entry + (VERSIONS - 1) * VERSION, state.to(state_ptr.dtype.element_ty), mask=in_state)
        rank += tl.num_programs(1)
        s, before = find_sequence(start_ptr, rank, S, CHUNKED, "long", BLOCK_S)


def launch_solve(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g_THK: Tensor, beta_TH: Tensor, starts: Tensor, scale: float,
    norm_eps: float, chunked: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What of chunks does not depend on states, for sequences of at least ``chunked`` tokens: U [chunks, H, 64, V]; W,
    queries and keys with decays [chunks, H, 64, K]; products of queries and keys [chunks, H, 64, 64]; and what states
    are multiplied by [chunks, H, K]. V and K are padded to powers of two."""
    (T, G, K), (H, V) = q_TGK.shape, v_THV.shape[1:]
    emulated = triton.knobs.runtime.interpret
    chunks = (T + CHUNKED - 1) // CHUNKED  # a sequence of n tokens has at most n / CHUNKED
    K_pad, V_pad = (max(16, triton.next_power_of_2(n)) for n in (K, V))

    def room(*shape: int, exact: bool = False) -> Tensor:
        return q_TGK.new_empty((chunks, H, *shape), dtype=torch.float32 if emulated or exact else q_TGK.dtype)

    u, (w, queries, keys) = room(64, V_pad), (room(64, K_pad) for _ in range(3))
    sums, decay = (room(*shape, exact=True) for shape in ((64, K_pad), (K_pad,)))
    solved = (u, w, queries, keys, room(64, 64))
    S, common = starts.shape[0] - 1, {"H": H, "K": K, "K_PAD": K_pad, "CHUNKED": chunked, "BLOCK_S": 256}
    launch_triton(
        _sums_kernel, (chunks * H,), g_THK, starts, sums, decay, S, G_ROW=g_THK.stride(0), G_HEAD=g_THK.stride(1),
        **common, num_warps=4,
    )  # fmt: skip
    tensors = {"Q": q_TGK, "K": k_TGK, "V": v_THV, "BETA": beta_TH}
    launch_triton(
        _solve_kernel, (chunks * H,), q_TGK, k_TGK, v_THV, beta_TH, starts, sums, *solved, scale, norm_eps, S,
        **{f"{n}_{of}": t.stride(i) for n, t in tensors.items() for i, of in enumerate(("ROW", "HEAD"))},
        **common, SHARE=H // G, V=V, V_PAD=V_pad, NORM=norm_eps > 0, BLOCK_K=min(32, K_pad), EMULATED=emulated,
        num_warps=4,
    )  # fmt: skip
    return (*solved, decay)


def launch_carry(
    state: Tensor, at: Slots, out_THV: Tensor, solved: tuple[Tensor, ...], chunked: int, block_v: int
) -> None:
    """States of sequences of at least ``chunked`` tokens, and what they answer. block_v: rows of a state that a program
    has."""
    versions, H, V, K = state.shape[1:]
    launch_triton(
        _carry_kernel, (H * ((V + block_v - 1) // block_v), _LANES),
        state, out_THV, *at, *solved, at.slots.shape[0],
        SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=versions, H=H, K=K, V=V,
        K_PAD=solved[1].shape[3], V_PAD=solved[0].shape[3], BLOCK_V=block_v, CHUNKED=chunked, BLOCK_S=256,
        EMULATED=triton.knobs.runtime.interpret, num_warps=4, num_stages=3,
    )  # fmt: skip


def _supports(site: CallSite) -> bool:
    return site.args["g"].dim() == 3 and has_prompts(site)


def _configs(site: CallSite) -> list[dict[str, int]]:
    """Rows of a state that a program has: what ran on an H200 beside float64."""
    return [{"block_v": 32}, {"block_v": 64}]


@gated_delta.impl("triton_channels", device="cuda", supports=_supports, configs=_configs)
def triton_channels(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor, at: Slots, scale: float,
    norm_eps: float, *, block_v: int,
) -> Tensor:  # fmt: skip
    """Sequences of many tokens by chunks, in three launches, and the others token by token in a fourth."""
    out_THV = v_THV.new_empty(v_THV.shape)
    chunked = max(CHUNKED, state.shape[1] + 1)  # at most as many tokens as versions: each one's state is kept
    solved = launch_solve(q_TGK, k_TGK, v_THV, g, beta_TH, at.query_start_loc, scale, norm_eps, chunked)
    launch_carry(state, at, out_THV, solved, chunked, block_v)
    launch_tokens(q_TGK, k_TGK, v_THV, g, beta_TH, state, at, out_THV, scale, norm_eps, below=chunked)
    return out_THV
