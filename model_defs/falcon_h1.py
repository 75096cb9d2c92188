"""Falcon-H1: every layer has Mamba2 and attention side by side, whose results are added, and numbers that scale all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn.functional import silu

from graphllm.config import ConfigError
from graphllm.config.fields import number, raw, switch
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs import llama, mamba2
from graphllm.model_defs.common import HF, check_plain, extended, head_matrix
from graphllm.model_defs.granite_hybrid import mixer_of
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "rms_norm_eps": 1e-5,
    "vocab_size": 128000, "projectors_bias": False,
}  # fmt: skip


@dataclass(frozen=True)
class Config(llama.Config):
    """Numbers that scale the stream at different places, by the names of the file; mixer: the recurrent part."""

    mixer: mamba2.Mixer | None = None
    embed_scale: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    gate_scale: float = 1.0
    down_scale: float = 1.0
    logits_scale: float = 1.0


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    hf = _DEFAULTS | dict(hf)
    dense = llama.from_hf({**hf, "layer_types": None, "mlp_bias": False}, "Llama")
    if switch(hf, "mlp_bias", False):
        raise ConfigError("config.json: mlp_bias is True, which is not supported; use a checkpoint without it")
    before = switch(hf, "mamba_norm_before_gate", True)
    order: mamba2.Order = "gate last" if before else "gate first"
    norm: mamba2.Order = order if switch(hf, "mamba_rms_norm", False) else ""
    gate_scale, down_scale = numbers(hf, "mlp_multipliers", 2)
    return extended(
        Config,
        dense,
        layer_types=("hybrid",) * len(dense.layer_types),
        scale=dense.scale * number(hf, "key_multiplier", 1.0),
        mixer=replace(mixer_of(hf, dense.D, dense.eps), norm=norm, scales=numbers(hf, "ssm_multipliers", 5)),
        embed_scale=number(hf, "embedding_multiplier", 1.0),
        attention_in=number(hf, "attention_in_multiplier", 1.0),
        attention_out=number(hf, "attention_out_multiplier", 1.0),
        ssm_in=number(hf, "ssm_in_multiplier", 1.0),
        ssm_out=number(hf, "ssm_out_multiplier", 1.0),
        gate_scale=gate_scale,
        down_scale=down_scale,
        logits_scale=number(hf, "lm_head_multiplier", 1.0),
    )


def numbers(hf: HF, name: str, count: int) -> tuple[float, ...]:
    """So many numbers of a list, ones where there is none. Raises ConfigError for anything else."""
    given = raw(hf, name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count or not all(type(n) in (int, float) for n in given):
        raise ConfigError(f"config.json: {name} is {given!r}; give {count} numbers")
    return tuple(float(n) for n in given)


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    mlp = llama.LAYER + "feed_forward."
    assert c.mixer is not None
    return {
        **llama.attention_weights(c),
        "ffn_norm": Weight((c.D,), (llama.LAYER + "pre_ff_layernorm.weight",)),
        **mamba2.mixer_weights(c.mixer, llama.LAYER + "mamba."),
        "gate_up": llama.merged("gate up", mlp, (c.F, c.F), c.D),
        "down": Weight((c.D, c.F), (mlp + "down_proj.weight",), shard="input"),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), ("model.final_layernorm.weight",)), "lm_head": head_matrix(c)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    assert c.mixer is not None
    return (*mamba2.mixer_states(c.mixer), *llama.states(c, "full"))


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return llama.embed(c, w, ctx, c.embed_scale)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    assert c.mixer is not None
    mixed_TD = c.ssm_out * mamba2.mix(c.mixer, w, c.ssm_in * h_TD, ctx)
    x_TD = x_TD + (mixed_TD + c.attention_out * llama.attend(c, "full", w, c.attention_in * h_TD, ctx))
    gate_TF, up_TF = linear(rms_norm(x_TD, w.ffn_norm, c.eps), w.gate_up).chunk(2, 1)
    return x_TD + c.down_scale * linear(up_TF * silu(c.gate_scale * gate_TF), w.down)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_RD = llama.norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices))
    return c.logits_scale * linear(h_RD, w.lm_head)


register_model(
    replace(
        llama.MODEL,
        architectures=("FalconH1ForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                llama.GRAPH, layer_weights=layer_weights, head_weights=head_weights, embed=embed, layer=layer,
                head=head, states=states,
            ),
        ),
        shardable=(*llama.MODEL.shardable, *mamba2.SHARDABLE),
        shared=(*llama.MODEL.shared, *mamba2.SHARED),
    )
)  # fmt: skip
