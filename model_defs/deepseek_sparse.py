"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose tokens look at a few earlier ones only, which an indexer chooses.

The indexer has heads of its own over one key a token, in a cache beside the latents. GLM's layers may take what the
layer before them chose. Sources: DeepSeek-AI 2025, DeepSeek-V3.2; Z.ai 2026, GLM-5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, raw, strings, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import deepseek, deepseek_moe, llama, mla
from graphllm.model_defs.common import HF, LARGEST_HEAD, extended, layer_types_of, only
from graphllm.ops.attention.index_topk import index_state, index_topk
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.sparse_latent_attention import sparse_latent_attention
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.ops.rows.store_rows import store_rows

_GLM = "GlmMoeDsaForCausalLM"
# What files leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {
        "max_position_embeddings": 163_840, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "index_n_heads": 64,
    },
    _GLM: {
        "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "index_n_heads": 32,
    },
}  # fmt: skip
_KINDS = {"full": "indexed", "shared": "shared"}
_EPS = 1e-6  # of the norm of index keys


@dataclass(frozen=True)
class Indexer:
    """Sizes of what chooses tokens.

    H: heads.
    E: numbers of a head, of which the first ones are rotated.
    topk: tokens that a token sees.
    interleaved: whether neighbours are rotated together, else entries half of the rotated ones apart.
    """

    H: int
    E: int
    topk: int
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.Config):
    """Layer types begin with "indexed", or with "shared" where a layer sees what the last indexed one chose."""

    indexer: Indexer

    @property
    def shares(self) -> bool:
        """Whether layers take what others chose."""
        return any(layer_type.startswith("shared") for layer_type in self.layer_types)


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    architecture = hf["architectures"][0]
    glm, hf = architecture == _GLM, _DEFAULTS[architecture] | dict(hf)
    attention = mla.from_hf(hf, interleaved=True)
    only(hf, "indexer_rope_interleave", glm)
    if not attention.Q:
        raise ConfigError("config.json: q_lora_rank is null; the indexer makes its queries of that latent")
    E = whole(hf, "index_head_dim", 128, le=LARGEST_HEAD)
    if attention.R > E:
        raise ConfigError(f"config.json: index_head_dim is {E}, less than qk_rope_head_dim {attention.R}")
    indexer = Indexer(whole(hf, "index_n_heads"), E, whole(hf, "index_topk", 2048, le=MOST), interleaved=glm)
    dense = llama.from_hf({**hf, "head_dim": attention.R}, "Llama")
    kinds = _kinds(hf, len(dense.layer_types)) if glm else ("indexed",) * len(dense.layer_types)
    types = deepseek_moe.layer_types(kinds, hf)
    found = deepseek_moe.routing(hf) | {"layer_types": types}
    return extended(Config, dense, mla=attention, indexer=indexer, **found)


def _kinds(hf: HF, L: int) -> tuple[str, ...]:
    """Which of GLM's layers have an indexer: those that a list says, a text of F and S, or one of so many."""
    listed = strings(hf, "indexer_types")
    pattern = raw(hf, "index_topk_pattern")
    if not listed and isinstance(pattern, str):
        listed = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    elif not listed:
        listed = strings(hf, "index_topk_pattern")
    if listed:
        kinds = layer_types_of(listed, L, _KINDS, "indexer_types")
    else:
        every, first = max(whole(hf, "index_topk_freq", 1, ge=0), 1), whole(hf, "index_skip_topk_offset", 2, ge=0)
        kinds = tuple("shared" if max(i - first + 1, 0) % every else "indexed" for i in range(L))
    if kinds[0] == "shared":
        raise ConfigError("config.json: the first layer has no indexer, and none before it has chosen tokens")
    return kinds


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    found = deepseek.layer_weights(c, layer_type)
    if layer_type.startswith("shared"):
        return found
    of, i = llama.LAYER + "self_attn.indexer.", c.indexer
    return found | {
        "index_q": Weight((i.H * i.E, c.mla.Q), (of + "wq_b.weight",)),
        "index_k": Weight((i.E, c.D), (of + "wk.weight",)),
        "index_norm": Weight((i.E,), (of + "k_norm.weight",)),
        "index_norm_bias": Weight((i.E,), (of + "k_norm.bias",)),
        "index_weights": Weight((i.H, c.D), (of + "weights_proj.weight",), dtype="float32"),
    }


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    own = () if layer_type.startswith("shared") else (index_state(c.indexer.E),)
    return (*mla.states(c.mla), *own)


def model_states(c: Config) -> tuple[StateSpec, ...]:
    """What one layer hands to the next ones."""
    return (StateSpec("chosen", "token", (c.indexer.topk,), "int32", "none"),) if c.shares else ()


def choose(c: Config, w: SimpleNamespace, q_TQ: Tensor, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """The tokens that each row sees. q_TQ: the latent that queries are made of. h_TD: normalized rows."""
    i = c.indexer
    q_THE = rope(linear(q_TQ, w.index_q).unflatten(1, (i.H, i.E)), *ctx.shared, interleaved=i.interleaved)
    k_TE = layer_norm(linear(h_TD, w.index_k), w.index_norm, w.index_norm_bias, _EPS)
    k_TE = rope(k_TE.unsqueeze(1), *ctx.shared, interleaved=i.interleaved).squeeze(1)
    weights_TH = linear(h_TD.to(w.index_weights.dtype), w.index_weights)
    chosen_TK = index_topk(q_THE, k_TE, weights_TH, ctx.state.index, *ctx.attn, topk=i.topk)
    if c.shares:
        store_rows(chosen_TK, ctx.state.chosen)
    return chosen_TK


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    q_TQ, rows = mla.project(c.mla, w, h_TD, ctx)
    chosen = ctx.state.chosen if layer_type.startswith("shared") else choose(c, w, q_TQ, h_TD, ctx)
    attn, scale = ctx.attn, c.mla.scale
    out_THV = sparse_latent_attention(*rows, w.k_up, w.v_up, ctx.state.latent, *attn, chosen_TK=chosen, scale=scale)
    x_TD = x_TD + linear(out_THV.flatten(1), w.o, getattr(w, "o_bias", None))
    return deepseek_moe.feed_forward(c, layer_type, w, x_TD)


MODEL = register_model(
    replace(
        deepseek.MODEL,
        architectures=tuple(_DEFAULTS),
        config=from_hf,
        graphs=(replace(deepseek.GRAPH, layer_weights=layer_weights, layer=layer, states=states),),
        states=model_states,
    )
)
