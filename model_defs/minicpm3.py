"""MiniCPM3: attention over latents, and Granite's numbers that scale the embedding, every addition to the stream, and
the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config.fields import number, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import granite, llama, mla
from graphllm.model_defs.common import HF, extended, only, widths
from graphllm.ops.norms.rms_norm import rms_norm

# What files leave out.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "kv_lora_rank": 256,
    "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """H, K and E are those of mla."""

    mla: mla.Attention


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    hf = _DEFAULTS | dict(hf)
    D, _, E = widths(hf, "hidden_size", "num_attention_heads")
    attention = mla.from_hf({**hf, "v_head_dim": whole(hf, "v_head_dim", E, E)}, interleaved=False)
    dense = llama.from_hf({**hf, "head_dim": attention.R}, "Llama")
    only(hf, "mlp_bias", False)
    depth = math.sqrt(len(dense.layer_types))
    return extended(
        Config,
        dense,
        mla=attention,
        embed_scale=number(hf, "scale_emb", 12),
        residual_scale=number(hf, "scale_depth", 1.4, depth) / depth,
        logits_divisor=D / whole(hf, "dim_model_base", 256, D),
    )


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    return mla.weights(c.mla) | llama.mlp_weights(llama.LAYER + "mlp.", c.F, c.D)


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return mla.states(c.mla)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    x_TD = x_TD + c.residual_scale * mla.attend(c.mla, w, rms_norm(x_TD, w.attn_norm, c.eps), ctx)
    return x_TD + c.residual_scale * llama.mlp(w, rms_norm(x_TD, w.ffn_norm, c.eps))


register_model(
    replace(
        llama.MODEL,
        architectures=("MiniCPM3ForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                llama.GRAPH, layer_weights=layer_weights, embed=granite.embed, layer=layer, head=granite.head,
                states=states,
            ),
        ),
        shardable=(*mla.SHARDABLE, "F"),
    )
)  # fmt: skip
