"""A small family whose layers keep unlike states: two recurrent ones of unlike dtypes, quantized latents that serve as
keys and values, and a sliding window. Its ops are defined here, and `expected` computes whole sequences without them.
Imported by tests that register it, so that other tests do not see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from graphllm.ir import Cost, Graph, Model, StateSpec, Weight, nbytes, op, register_model
from graphllm.ir.model import ForwardContext, select_rows
from graphllm.ops.linear import linear
from graphllm.ops.paged_attention import kv_state, paged_attention

D, V, WINDOW, TAIL = 32, 97, 12, 3
LAYERS = ("recurrent", "latent", "window", "recurrent")
HF = {"architectures": ["UnlikeLayersForCausalLM"], "model_type": "unlike_layers", "max_position_embeddings": 96}


@dataclass(frozen=True)
class Config:
    V: int = V
    max_len: int = 96


def quantized(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8 and their scales."""
    scale_T = x_TD.abs().amax(-1).clamp(min=1e-6) / 127
    return (x_TD / scale_T[:, None]).round().to(torch.int8), scale_T


@op(boundary=True, mutates=("tail", "total"), cost=lambda x_TD: Cost(2 * nbytes(x_TD), x_TD.numel()))
def unlike_recurrent(
    x_TD: Tensor, tail: Tensor, total: Tensor, query_start_loc: Tensor, slots: Tensor, state_versions: Tensor
) -> Tensor:
    """x plus the mean of the last rows before it (tail [N, versions, 3, D]) plus a decaying sum of all (total [N,
    versions, D] float64). slots, state_versions [S]: where a sequence's states are; see docs/architecture.md."""
    out_TD, versions, starts = torch.zeros_like(x_TD), tail.shape[1], query_start_loc.tolist()
    for s, (slot, version) in enumerate(zip(slots.tolist(), state_versions.tolist(), strict=True)):
        rows = x_TD[starts[s] : starts[s + 1]]
        last, sums = tail[slot, version].clone(), total[slot, version].clone()
        for i, row in enumerate(rows):
            sums = 0.75 * sums + row
            out_TD[starts[s] + i] = row + last.mean(0) + sums.to(row.dtype)
            last = torch.cat([last[1:], row[None]])
            if i == len(rows) - 1 or len(rows) <= versions:
                tail[slot, min(i, versions - 1)], total[slot, min(i, versions - 1)] = last, sums
    return out_TD


@op(boundary=True, mutates=("latent", "scale"), cost=lambda x_TD: Cost(2 * nbytes(x_TD), x_TD.numel()))
def unlike_latent(
    x_TD: Tensor, latent: Tensor, scale: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Tensor:
    """Causal attention over rows that are key and value at once, stored as int8: latent [B, P, D], scale [B, P]."""
    out_TD, P, starts = torch.zeros_like(x_TD), latent.shape[1], query_start_loc.tolist()
    for s, length in enumerate(seq_lens.tolist()):
        a, b = starts[s], starts[s + 1]
        if a == b:
            continue
        at = torch.arange(length)
        block = block_table[s, at // P].long()
        new = at[length - b + a :]
        latent[block[new], new % P], scale[block[new], new % P] = quantized(x_TD[a:b])
        kept = latent[block, at % P].to(x_TD.dtype) * scale[block, at % P][:, None]
        scores = (x_TD[a:b] @ kept.T).masked_fill(at > new[:, None], float("-inf"))
        out_TD[a:b] = torch.softmax(scores, -1) @ kept
    return out_TD


@unlike_recurrent.fake
def _(x_TD: Tensor) -> Tensor:
    return torch.empty_like(x_TD)


@unlike_latent.fake
def _(x_TD: Tensor) -> Tensor:
    return torch.empty_like(x_TD)


def _layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD, given, attn = linear(rms_norm(x_TD, (D,)), w.mix), ctx.inputs, ctx.attn
    if layer_type == "recurrent":
        state = (ctx.state.tail, ctx.state.total)
        return x_TD + unlike_recurrent(h_TD, *state, given.query_start_loc, given.slots, given.state_versions)
    if layer_type == "latent":
        return x_TD + unlike_latent(h_TD, ctx.state.latent, ctx.state.scale, *attn)
    h_THE = h_TD.view(-1, 1, D)
    out_THE = paged_attention(h_THE, h_THE, h_THE, ctx.state.kv, *attn, 1.0, WINDOW)
    return x_TD + out_THE.view(-1, D)


def _states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return {
        "recurrent": (
            StateSpec("tail", "slot", (TAIL, D), retention="last"),
            StateSpec("total", "slot", (D,), "float64", "last"),
        ),
        "latent": (StateSpec("latent", "block", ("P", D), "int8"), StateSpec("scale", "block", ("P",), "float32")),
        "window": (kv_state(1, D, WINDOW),),
    }[layer_type]


def register() -> Model:
    return register_model(
        Model(
            architectures=("UnlikeLayersForCausalLM",),
            config=lambda hf: Config(),
            graphs=(
                Graph(
                    layer_types=lambda c: LAYERS,
                    embed_weights=lambda c: {"tokens": Weight((V, D), (("embed",),))},
                    layer_weights=lambda c, layer_type: {"mix": Weight((D, D), (("layers.{layer}.mix",),))},
                    head_weights=lambda c: {"out": Weight((V, D), (("out",),))},
                    embed=lambda c, w, ctx: (torch.index_select(w.tokens, 0, ctx.inputs.token_ids), ()),
                    layer=_layer,
                    head=lambda c, w, x_TD, ctx: linear(select_rows(x_TD, ctx.inputs.logits_indices), w.out),
                    states=_states,
                ),
            ),
        )
    )


def checkpoint() -> dict[str, Tensor]:
    """Random weights, by name."""
    torch.manual_seed(5)
    mixes = {f"layers.{i}.mix": torch.randn(D, D) * D**-0.5 for i in range(len(LAYERS))}
    return {"embed": torch.randn(V, D), "out": torch.randn(V, D), **mixes}


def logits(weights: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """Those after the last token, from the whole sequence at once."""
    x, n = weights["embed"][tokens], len(tokens)
    at = torch.arange(n)
    past = at[None, :] <= at[:, None]
    for i, layer_type in enumerate(LAYERS):
        h = rms_norm(x, (D,)) @ weights[f"layers.{i}.mix"].T
        if layer_type == "recurrent":
            padded = torch.cat([torch.zeros(TAIL, D), h])
            means = torch.stack([padded[t : t + TAIL].mean(0) for t in range(n)])
            decay = torch.where(past, 0.75 ** (at[:, None] - at[None, :]).clamp(min=0).double(), 0)
            x = x + h + means + (decay @ h.double()).float()
            continue
        ids, scales = quantized(h)
        seen = past if layer_type == "latent" else past & (at[None, :] > at[:, None] - WINDOW)
        keys = ids.float() * scales[:, None] if layer_type == "latent" else h
        x = x + torch.softmax((h @ keys.T).masked_fill(~seen, float("-inf")), -1) @ keys
    return weights["out"] @ x[-1]


def greedy(weights: Mapping[str, Any], prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(weights, tokens).argmax()))
    return tokens[len(prompt) :]
