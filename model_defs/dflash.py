"""DFlash: a few layers that guess a block of tokens in one run, over keys and values of the model's hidden states.

As in the checkpoints z-lab/*-DFlash*. Of each known token a layer keeps keys and values of the model's hidden states of
several layers, joined by fc; it computes nothing else of it. Drafts begin as masks after the token last sampled, and
see all of that, and each other. The embedding and the head are the model's. Source: z-lab 2026, DFlash: Block Diffusion
for Flash Speculative Decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import number, section, whole
from graphllm.ir import ForwardContext, Graph, Weight, register_model, select_rows
from graphllm.ir.model import Hidden
from graphllm.model_defs import eagle, llama
from graphllm.model_defs.common import HF, extended, main_head, main_tokens, named_too, only
from graphllm.ops.activations.soft_cap import soft_cap
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.store_kv import store_kv
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_MOST = 63  # tokens of a block, which attention tells apart by bits


@dataclass(frozen=True)
class Config(llama.Config):
    """In a layer of the type "full", all rows of a block see each other. In "causal" and "sliding" layers, a row sees
    only earlier rows."""

    drafts: int = 0  # of a block, without the token that it begins with
    mask_token: int = 0
    hidden_layers: tuple[int, ...] = ()  # the main model's layers that it reads, from 0; empty: its own number, spread
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    own = {**hf, **section(hf, "dflash_config")}  # older files have some of them in one place, newer in the other
    for name in ("use_swa", "attention_sink_bias", "add_swa_attention_sink_bias"):
        only(own, name, False, None)
    layers = own.get("target_layer_ids", [])
    if not isinstance(layers, list) or not all(type(i) is int and i >= 0 for i in layers):
        raise ConfigError(f"config.json: target_layer_ids is {layers!r:.80}; give a list of layers")
    if own.get("mask_token_id") is None:
        raise ConfigError("config.json: mask_token_id is missing, the token that stands for drafts; add it")
    causal = own.get("is_causal", own.get("causal"))
    plain = {name: value for name, value in hf.items() if name != "is_causal"}
    c = llama.from_hf(plain, "Qwen3")
    if causal is False and "sliding" in c.layer_types:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, and is_causal is false: a window to both sides is not "
            "supported; use a checkpoint with one of them"
        )
    return extended(
        Config,
        c,
        layer_types=tuple("causal" if causal and t == "full" else t for t in c.layer_types),
        drafts=whole(own, "block_size", 16, ge=2, le=_MOST) - 1,
        mask_token=whole(own, "mask_token_id", ge=0, le=c.V - 1),
        hidden_layers=tuple(layers),
        embedding_scale=number(own, "input_embedding_scale", 1.0),
        logit_scale=number(own, "output_multiplier", 1.0),
        logit_cap=number(own, "final_logit_softcapping", 0.0, null=0.0, ge=0),
    )


def hidden(c: Config, layers: int) -> Hidden:
    """Where the file does not say, from the second layer to the third last one."""
    spread = max(_parts(c) - 1, 1)
    chosen = tuple(round(1 + i * (layers - 4) / spread) for i in range(_parts(c))) if _parts(c) > 1 else (layers // 2,)
    return Hidden(c.hidden_layers or chosen, c.D, normed=False)


def _parts(c: Config) -> int:
    return len(c.hidden_layers) or len(c.layer_types)


def embed_weights(c: Config) -> dict[str, Weight]:
    return {"tokens": main_tokens(c), "inv_freq": c.rope.weight()}


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), ("norm.weight",)), "lm_head": main_head(c)}


def project_weights(c: Config) -> dict[str, Weight]:
    return {"fc": Weight((c.D, _parts(c) * c.D), ("fc.weight",)), "norm": Weight((c.D,), ("hidden_norm.weight",))}


def project(c: Config, w: SimpleNamespace, hidden_TD: Tensor) -> Tensor:
    return rms_norm(linear(hidden_TD, w.fc), w.norm, c.eps)


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    """Keys and values have a matrix of their own, as known tokens need nothing else of a layer."""
    weights = llama.layer_weights(c, layer_type)
    own, sizes = llama.LAYER + "self_attn.", {"q": (c.H * c.E,), "kv": (c.K * c.E, c.K * c.E)}
    del weights["qkv"]
    weights |= {name: llama.merged(" ".join(name), own, rows, c.D) for name, rows in sizes.items()}
    if c.qkv_bias:
        del weights["qkv_bias"]
        weights |= {f"{name}_bias": llama.merged(" ".join(name), own, rows) for name, rows in sizes.items()}
    weights = named_too(weights, llama.LAYER, "layers.{layer}.")
    again = [name for name in ("kv", "kv_bias", "k_norm") if name in weights]
    return weights | {f"context_{n}": Weight(weights[n].shape, tie="layers.{layer}." + n) for n in again}


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return llama.embed(c, w, ctx, c.embedding_scale)


def context(c: Config, layer_type: str, w: SimpleNamespace, ctx: ForwardContext) -> None:
    x_TD, bias = ctx.inputs.hidden, getattr(w, "context_kv_bias", None)
    k_TKE, v_TKE = _keys_and_values(c, x_TD, w.context_kv, bias, w.context_k_norm, ctx)
    store_kv(k_TKE, v_TKE, ctx.state.kv, *ctx.attn)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    q_THE = rms_norm(linear(h_TD, w.q, getattr(w, "q_bias", None)).unflatten(1, (c.H, c.E)), w.q_norm, c.eps)
    k_TKE, v_TKE = _keys_and_values(c, h_TD, w.kv, getattr(w, "kv_bias", None), w.k_norm, ctx)
    a_THE = paged_attention(
        *(rope(q_THE, *ctx.shared), k_TKE, v_TKE, ctx.state.kv, *ctx.attn),
        scale=c.scale,
        window=c.window if layer_type == "sliding" else 0,
        ancestors_T=ctx.inputs.block_bits if layer_type == "full" else None,
    )
    return llama.feed_forward(c, w, x_TD + linear(a_THE.flatten(1), w.o, getattr(w, "o_bias", None)))


def _keys_and_values(
    c: Config, x_TD: Tensor, kv: Tensor, bias: Tensor | None, norm: Tensor, ctx: ForwardContext
) -> tuple[Tensor, Tensor]:
    k_TKE, v_TKE = linear(x_TD, kv, bias).unflatten(1, (2 * c.K, c.E)).split(c.K, 1)
    return rope(rms_norm(k_TKE, norm, c.eps), *ctx.shared), v_TKE


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    logits_RV = linear(llama.norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices)), w.lm_head)
    if c.logit_scale != 1:
        logits_RV = logits_RV * c.logit_scale
    return soft_cap(logits_RV, c.logit_cap) if c.logit_cap else logits_RV


GRAPH = Graph(
    lambda c: c.layer_types, embed_weights, layer_weights, head_weights, embed, layer, head, llama.states,
    hidden=hidden, project_weights=project_weights, project=project, drafts_at_once=lambda c: c.drafts,
    context=context, mask_token=lambda c: c.mask_token, task="draft",
)  # fmt: skip
register_model(
    replace(eagle.MODEL, architectures=("DFlashDraftModel",), config=from_hf, method="dflash", graphs=(GRAPH,))
)
