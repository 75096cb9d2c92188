"""Kimi Linear: three of four layers are delta nets whose decays are of each key channel, the others attend over latents
and know no positions; then experts as DeepSeek-V3 has them.

Decays and output gates of a delta net come from a narrow projection each, which every rank computes. Source: Kimi
Team 2025, "Kimi Linear".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import note, read, section, strings, switch, whole
from graphllm.config.parameter import Check, is_int
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import deepseek, deepseek_moe, llama, mla, moe
from graphllm.model_defs.common import HF, LARGEST_HEAD, MOST_LAYERS, extended, layer_types_of, named_too, only
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.ops.recurrent.causal_conv import causal_conv
from graphllm.ops.recurrent.gated_delta import gated_delta
from graphllm.ops.recurrent.slots import Slots
from graphllm.weights.plan.expr import Concat, Each, Read, Reshape

_KEY_EPS = 1e-6  # under the root that queries and keys of a delta net are divided by
_KINDS = {"full_attention": "full", "linear_attention": "linear"}
# DeepSeek's names of what the family's files call otherwise.
_NAMES = {
    "model_max_length": "max_position_embeddings", "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group", "moe_router_activation_func": "scoring_func",
}  # fmt: skip
# What files leave out.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5, "q_lora_rank": None, "first_k_dense_replace": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.446,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.Config):
    """A delta net has H_delta heads of queries, keys and values of E_delta numbers. taps: inputs that its convolutions
    weigh."""

    H_delta: int
    E_delta: int
    taps: int


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``, as published or as transformers writes it. Raises ConfigError for settings that
    are not supported."""
    note(hf, *_NAMES)
    hf = _DEFAULTS | {_NAMES.get(name, name): value for name, value in hf.items()}
    only(hf, "mla_use_nope", True)
    only(hf, "mla_use_output_gate", False)
    only(hf, "attn_res_block_size", None)
    if not switch(hf, "use_grouped_topk", True):
        hf |= {"n_group": 1, "topk_group": 1}
    attention = replace(mla.from_hf(hf, interleaved=False), rotary=False)
    unrotated = {"rope_theta": 10000.0, "rope_parameters": None, "rope_scaling": None}
    dense = llama.from_hf({**hf, **unrotated, "head_dim": attention.R}, "Llama")
    published = section(hf, "linear_attn_config")
    only(published, "use_full_rank_gate", False)
    only(published, "gate_lower_bound", None)
    H, E = whole(hf, "linear_num_heads", 32), whole(hf, "linear_head_dim", 128, le=LARGEST_HEAD)
    taps = whole(hf, "linear_conv_kernel_dim", 4, ge=2, le=64)
    types = deepseek_moe.layer_types(_attention_types(hf, published), hf)
    return extended(
        Config,
        dense,
        **deepseek_moe.routing(hf) | {"layer_types": types},
        mixtral=True,  # so are experts called
        mla=attention,
        H_delta=whole(published, "num_heads", H),
        E_delta=whole(published, "head_dim", E, le=LARGEST_HEAD),
        taps=whole(published, "short_conv_kernel_size", taps, ge=2, le=64),
    )


def _attention_types(hf: HF, published: Mapping[str, Any]) -> tuple[str, ...]:
    """ "full" or "linear" of each layer. Published files list the numbers of both kinds, from 1 on."""
    L = whole(hf, "num_hidden_layers", le=MOST_LAYERS)
    kinds = strings(hf, "layer_types")
    if kinds or not published:
        usual = ("full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(L))
        return layer_types_of(kinds or tuple(usual), L, _KINDS)
    right = Check(lambda v: isinstance(v, list) and all(map(is_int, v)), "set it to the checkpoint's list of numbers")
    full, delta = (list(read(published, name, right)) for name in ("full_attn_layers", "kda_layers"))
    if sorted(full + delta) != list(range(1, L + 1)):
        raise ConfigError(
            f"config.json: linear_attn_config names layers {sorted(full + delta)} in full_attn_layers and kda_layers; "
            f"give each of 1 to num_hidden_layers = {L} once"
        )
    return tuple("full" if i + 1 in full else "linear" for i in range(L))


def embed_weights(c: Config) -> dict[str, Weight]:
    return {"tokens": llama.embed_weights(c)["tokens"]}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    attention = mla.weights(c.mla)
    norms = {name: attention[name] for name in ("attn_norm", "ffn_norm")}
    mixer = _delta_weights(c) if _linear(layer_type) else attention
    return norms | mixer | _feed_forward_weights(c, layer_type)


def _feed_forward_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    """What all tokens share lies beside the experts; transformers calls a dense part so, too."""
    of, found = llama.LAYER + "mlp.", deepseek_moe.weights(c, layer_type)
    apart = ("router", "gate_up", "down") if moe.sparse(layer_type) else ()
    shared = {name: weight for name, weight in found.items() if name not in apart}
    return found | named_too(shared, of, llama.LAYER + "block_sparse_moe.")


def _delta_weights(c: Config) -> dict[str, Weight]:
    delta, H, E = llama.LAYER + "self_attn.", c.H_delta, c.E_delta
    rows = H * E
    taps = tuple(Reshape(Read((f"{delta}{name}_conv1d.weight",), (rows, 1, c.taps)), (rows, c.taps)) for name in "qkv")
    by_head = Weight((H,), dtype="float32", shard="output", heads=(H,))
    stored = Reshape(Read((delta + "A_log",), (1, 1, H, 1)), (H,))
    narrow = (f"{delta}b_proj.weight", _of_decays("f_a"), f"{delta}g_a_proj.weight")
    return {
        "qkv": llama.merged("q k v", delta, (rows,) * 3, c.D, heads=(H,) * 3),
        "narrow": Weight((H + 2 * E, c.D), narrow, (H, E, E), shard="output", heads=(H, 1, 1)),
        "decay": Weight((rows, E), (_of_decays("f_b"),), shard="output", heads=(H,)),
        "conv": Weight(
            (3 * rows, c.taps), (), (rows,) * 3, shard="output", heads=(H,) * 3, exact=True, expr=Concat(taps)
        ),
        "decay_bias": Weight((rows,), (delta + "dt_bias",), dtype="float32", shard="output", heads=(H,)),
        "rate": replace(by_head, expr=Each("-exp", stored)),
        "gate": llama.merged("g_b", delta, (rows,), E, heads=(H,)),
        "delta_norm": Weight((E,), (delta + "o_norm.weight",)),
        "o": Weight((c.D, rows), (delta + "o_proj.weight",), shard="input"),
    }


def _of_decays(name: str) -> tuple[str, ...]:
    """Names of a projection. Adapters that were made with transformers have it in a module of its own."""
    return tuple(f"{llama.LAYER}self_attn.{module}{name}_proj.weight" for module in ("", "forget_gate."))


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    if not _linear(layer_type):
        return mla.states(c.mla)
    return (
        StateSpec("conv", "slot", (c.taps - 1, 3 * c.H_delta * c.E_delta), retention="last"),
        StateSpec("delta", "slot", (c.H_delta, c.E_delta, c.E_delta), "recurrent", "last"),
    )


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return embedding(ctx.inputs.token_ids, w.tokens), ()


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    x_TD = x_TD + (delta_net(c, w, h_TD, ctx) if _linear(layer_type) else mla.attend(c.mla, w, h_TD, ctx))
    return deepseek_moe.feed_forward(c, layer_type, w, x_TD)


def delta_net(c: Config, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """A delta net with decays by channel, from normalized rows to what is added to the stream."""
    at, by_head = Slots.of(ctx.inputs), (c.H_delta, c.E_delta)
    beta_TH, decay_TE, gate_TE = linear(h_TD, w.narrow).split((c.H_delta, c.E_delta, c.E_delta), 1)
    mixed = causal_conv(linear(h_TD, w.qkv), w.conv, ctx.state.conv, at)
    q_THE, k_THE, v_THE = (x.unflatten(1, by_head) for x in mixed.chunk(3, 1))
    steps = torch.nn.functional.softplus(linear(decay_TE, w.decay).float() + w.decay_bias)
    g_THE, beta_TH = w.rate[:, None] * steps.unflatten(1, by_head), torch.sigmoid(beta_TH.float())
    o_THE = gated_delta(q_THE, k_THE, v_THE, g_THE, beta_TH, ctx.state.delta, at, c.E_delta**-0.5, _KEY_EPS)
    gate_THE = torch.sigmoid(linear(gate_TE, w.gate)).unflatten(1, by_head)
    return linear((rms_norm(o_THE, w.delta_norm, c.eps) * gate_THE).flatten(1), w.o)


def _linear(layer_type: str) -> bool:
    return layer_type.startswith("linear")


register_model(
    replace(
        moe.MODEL,
        architectures=("KimiLinearForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                moe.GRAPH, embed_weights=embed_weights, layer_weights=layer_weights, embed=embed, layer=layer,
                states=states,
            ),
        ),
        shardable=(*mla.SHARDABLE, "F", "F_expert", "F_shared", "H_delta"),
    )
)  # fmt: skip
