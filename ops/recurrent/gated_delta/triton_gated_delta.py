"""gated_delta on a GPU: a program has a block of rows of a head's state in registers for all of a sequence's tokens.

Steps with prompts in bfloat16 go by `triton_chunks` and `triton_channels`, which leave short sequences to the kernel
here.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ops.recurrent.gated_delta.op import gated_delta
from graphllm.ops.recurrent.gated_delta.triton_lengths import CHUNKED, find_sequence
from graphllm.ops.recurrent.slots import Slots

_NUMBERS = 2048  # of a state that a program has, if nothing else is chosen
_LANES = 16  # programs that share a block's short sequences in a step with prompts
_CHUNKED_SIZES = (128, 128)  # numbers of a value and of a key: chunks ran on a GPU with these


@triton.jit
def _one_token(
    state, t, head, key_head, rows, k, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, scale, norm_eps,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, G_ROW: tl.constexpr, G_HEAD: tl.constexpr, BETA_ROW: tl.constexpr, BETA_HEAD: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The state after token t, whose result is stored. Both sums are over the state before the token: out is
    scale * (exp(g) S q + delta k.q)."""
    t = t.to(tl.int64)
    key = tl.load(k_ptr + t * K_ROW + key_head * K_HEAD + k, mask=k < K, other=0.0).to(tl.float32)
    query = tl.load(q_ptr + t * Q_ROW + key_head * Q_HEAD + k, mask=k < K, other=0.0).to(tl.float32)
    value = tl.load(v_ptr + t * V_ROW + head * V_HEAD + rows, mask=rows < V, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + t * BETA_ROW + head * BETA_HEAD).to(tl.float32)
    gate = g_ptr + t * G_ROW + head * G_HEAD
    short_key, short_query = 1.0, scale  # factors of sums, so that none waits for the lengths
    if NORM:
        short_key = 1.0 / tl.sqrt_rn(tl.sum(key * key, 0) + norm_eps)
        short_query = scale / tl.sqrt_rn(tl.sum(query * query, 0) + norm_eps)
    if CHANNELS:
        decay = tl.exp(tl.load(gate + k, mask=k < K, other=0.0).to(tl.float32))[None, :]
    else:
        decay = tl.exp(tl.load(gate).to(tl.float32))
    seen = tl.sum(state * (decay * key[None, :]), 1) * short_key
    delta = (value - seen) * beta * short_key
    answer = tl.sum(state * (decay * query[None, :]), 1) + delta * tl.sum(key * query, 0)
    state = state * decay + delta[:, None] * key[None, :]
    answer *= short_query
    tl.store(out_ptr + (t * H + head) * V + rows, answer.to(out_ptr.dtype.element_ty), mask=rows < V)
    return state


@triton.jit(do_not_specialize_on_alignment=["S"])
def _delta_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, scale, norm_eps,
    S, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, G_ROW: tl.constexpr, G_HEAD: tl.constexpr, BETA_ROW: tl.constexpr, BETA_HEAD: tl.constexpr,
    SLOT: tl.constexpr, VERSION: tl.constexpr, VERSIONS: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, BLOCK_V: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_S: tl.constexpr, NORM: tl.constexpr,
    BELOW: tl.constexpr,  # sequences of as many tokens are left out, and longer ones; 0: none
    EMULATED: tl.constexpr,
):  # fmt: skip
    EARLY: tl.constexpr = BELOW == 0 and VERSIONS == 1
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()  # a kernel of the step makes the versions
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    key_head = head // SHARE
    k = tl.arange(0, K_PAD)
    inside = (rows < V)[:, None] & (k < K)[None, :]
    place = tl.program_id(2)
    s = place
    if BELOW > 0:
        s, _ = find_sequence(start_ptr, place, S, BELOW, "short", BLOCK_S)
    while s < S:
        first = tl.load(start_ptr + s)
        count = tl.load(start_ptr + 1 + s) - first
        entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT + (head * V + rows)[:, None] * K + k[None, :]
        read = entry
        if VERSIONS > 1:
            read += tl.load(version_ptr + s).to(tl.int64) * VERSION
        state = tl.load(read, mask=inside & (rows < tl.where(count > 0, V, 0))[:, None], other=0.0)
        if EARLY and not EMULATED:
            tl.extra.cuda.gdc_wait()
        if count > 0:
            if BELOW == 0 and count == 1:  # its rows are read while the state is
                after = _one_token(
                    state.to(tl.float32), first, head, key_head, rows, k, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr,
                    scale, norm_eps, Q_ROW, Q_HEAD, K_ROW, K_HEAD, V_ROW, V_HEAD, G_ROW, G_HEAD, BETA_ROW, BETA_HEAD,
                    H, K, V, CHANNELS, NORM,
                )  # fmt: skip
                tl.store(entry, after.to(state_ptr.dtype.element_ty), mask=inside)
            else:
                running = state.to(tl.float32)
                for i in range(count):
                    running = _one_token(
                        running, first + i, head, key_head, rows, k, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr,
                        scale, norm_eps, Q_ROW, Q_HEAD, K_ROW, K_HEAD, V_ROW, V_HEAD, G_ROW, G_HEAD, BETA_ROW,
                        BETA_HEAD, H, K, V, CHANNELS, NORM,
                    )  # fmt: skip
                    if (count <= VERSIONS) | (i == count - 1):
                        written = entry + tl.minimum(i, VERSIONS - 1).to(tl.int64) * VERSION
                        tl.store(written, running.to(state_ptr.dtype.element_ty), mask=inside)
        if BELOW > 0:
            place += tl.num_programs(2)
            s, _ = find_sequence(start_ptr, place, S, BELOW, "short", BLOCK_S)
        else:
            s = S


def has_prompts(site: CallSite) -> bool:
    """Whether `triton_chunks` or `triton_channels` serves the site: steps in bfloat16 in which a sequence may have
    enough tokens. Sums begin where a step's tokens do, so a deterministic site goes token by token."""
    q, k, v, state = (site.args[name] for name in ("q_TGK", "k_TGK", "v_THV", "state"))
    bucket = site.bucket
    return (
        not site.deterministic
        and bucket.kind == "mixed"
        and bucket.hi >= CHUNKED
        and all(t.dtype == torch.bfloat16 for t in (q, k, v))
        and tuple(state.shape[3:]) == _CHUNKED_SIZES
        and _plain(site)
    )


def _plain(site: CallSite) -> bool:
    v, g, state = (site.args[name] for name in ("v_THV", "g", "state"))
    rows = [site.args[name] for name in ("q_TGK", "k_TGK")] + [v]
    V, K = state.shape[3:]
    return (
        state.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(t.dtype.itemsize <= 4 and t.stride(2) == 1 for t in rows)
        and (g.dim() == 2 or g.stride(2) == 1)
        and state.stride()[2:] == (V * K, K, 1)
        and K <= _NUMBERS
    )


def _supports(site: CallSite) -> bool:
    return _plain(site) and not has_prompts(site)


def _configs(site: CallSite) -> list[dict[str, int]]:
    """Numbers of a state that a program has, and warps."""
    sizes = ((1024, 1), (2048, 4), (2048, 2), (4096, 4), (8192, 4), (4096, 2))
    return [{"numbers": numbers, "num_warps": warps} for numbers, warps in sizes]


@gated_delta.impl("triton", device="cuda", supports=_supports, configs=_configs, row_order=each_alone)
def triton_gated_delta(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor, at: Slots, scale: float,
    norm_eps: float, *, numbers: int = _NUMBERS, num_warps: int = 4,
) -> Tensor:  # fmt: skip
    """One launch, in which each token waits for the one before: good for decoding."""
    out_THV = v_THV.new_empty(v_THV.shape)
    sizes = {"numbers": numbers, "num_warps": num_warps}
    launch_tokens(q_TGK, k_TGK, v_THV, g, beta_TH, state, at, out_THV, scale, norm_eps, **sizes)
    return out_THV


def launch_tokens(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor, at: Slots,
    out_THV: Tensor, scale: float, norm_eps: float, below: int = 0, *, numbers: int = _NUMBERS, num_warps: int = 4,
) -> None:  # fmt: skip
    """Sequences of fewer than ``below`` tokens, one token after the other; all if it is 0. numbers: of a state that a
    program has."""
    (versions, H, V, K), S = state.shape[1:], at.slots.shape[0]
    K_pad = triton.next_power_of_2(K)
    block = max(1, min(triton.next_power_of_2(V), numbers // K_pad))
    lanes = S if not below else 2 if triton.knobs.runtime.interpret else _LANES  # programs are slow where interpreted
    tensors = {"Q": q_TGK, "K": k_TGK, "V": v_THV, "G": g, "BETA": beta_TH}
    launch_triton(
        _delta_kernel, ((V + block - 1) // block, H, lanes),
        q_TGK, k_TGK, v_THV, g, beta_TH, state, out_THV, *at, scale, norm_eps, S,
        **{f"{n}_{of}": t.stride(i) for n, t in tensors.items() for i, of in enumerate(("ROW", "HEAD"))},
        SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=versions, H=H, SHARE=H // q_TGK.shape[1], K=K, V=V,
        K_PAD=K_pad, BLOCK_V=block, CHANNELS=g.dim() == 3, NORM=norm_eps > 0, BELOW=below,
        BLOCK_S=256, EMULATED=triton.knobs.runtime.interpret, num_warps=num_warps,
    )  # fmt: skip
