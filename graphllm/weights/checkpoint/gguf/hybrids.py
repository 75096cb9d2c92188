"""GGUF's architectures with recurrent layers, as `graphllm.weights.checkpoint.gguf.decoders` has the others."""

from __future__ import annotations

from graphllm.weights.checkpoint.gguf import derived as d
from graphllm.weights.checkpoint.gguf.decoders import (
    ATTENTION,
    EXPERTS,
    FIELDS,
    GRANITE_EXPERTS,
    GRANITE_STACKS,
    LATENT,
    LATENT_FIELDS,
    LAYER,
    NAMES,
    PERMUTED,
    ROUTED,
    SCALES,
    SHARED,
    SHARED_DENSE,
    SIZES,
    SPLIT,
    STACKS,
    WHOLE,
)
from graphllm.weights.checkpoint.gguf.family import Change, Family, in_layers
from graphllm.weights.checkpoint.gguf.rotary import partly_rotary, rotary

_BACKBONE = "backbone.layers.{layer}."
_MIXED = WHOLE | {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
# Files have the decays, checkpoints their logarithms.
_LOG = Change((("log-",),))
_LESS_ONE = Change((("-1",),))
_UNUSED = {"feed_forward_length": "", "attention.head_count": ""}


def _mixer(of: str) -> dict[str, str | tuple[str, ...]]:
    """A mixer of Mamba or Mamba2. of: what a checkpoint's names begin with."""
    return in_layers(of, ssm_in="in_proj", ssm_conv1d="conv1d", ssm_out="out_proj", ssm_norm="norm") | {
        "blk.ssm_a": of + "A_log", "blk.ssm_d": of + "D",
    }  # fmt: skip


def _mamba(of: str) -> dict[str, str | tuple[str, ...]]:
    return _mixer(of) | in_layers(of, ssm_x="x_proj", ssm_dt="dt_proj")


def _mamba2(of: str) -> dict[str, str | tuple[str, ...]]:
    return _mixer(of) | {"blk.ssm_dt.bias": of + "dt_bias"}


_MAMBA_FIELDS = SIZES | _UNUSED | {
    "ssm.conv_kernel": "conv_kernel", "ssm.inner_size": "intermediate_size", "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank", "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "context_length": "", "ssm.dt_b_c_rms": "",
}  # fmt: skip
_MAMBA_PRESENT = {"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"}
_MAMBA_NAMES = _MIXED | _mamba(_BACKBONE + "mixer.") | in_layers(_BACKBONE, attn_norm="norm")
_MAMBA_CHANGES = {_BACKBONE + "mixer.A_log": _LOG}
_DELTA = LAYER + "linear_attn."
_DELTA_NAMES = NAMES | STACKS | SHARED | in_layers(
    LAYER, post_attention_norm="post_attention_layernorm", ssm_conv1d="linear_attn.conv1d",
    ssm_norm="linear_attn.norm", ssm_out="linear_attn.out_proj", attn_qkv="linear_attn.in_proj_qkv",
    attn_gate="linear_attn.in_proj_z",
) | {"blk.ssm_a": _DELTA + "A_log", "blk.ssm_dt.bias": _DELTA + "dt_bias"}  # fmt: skip
_DELTA_FIELDS = FIELDS | EXPERTS | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_DELTA_NORMS = {
    LAYER + f"{name}.weight": _LESS_ONE
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
} | {"model.norm.weight": _LESS_ONE}  # fmt: skip
_KEYS, _VALUES = (("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim"))


def _tiled(dim: int, keys: bool, values: bool) -> tuple[str | int, ...]:
    """Heads of values by turns of key heads. keys: whether queries and keys lie before them; values: whether a head
    has all numbers of a value, else one."""
    return ("tiled", dim, _KEYS[0], _KEYS[1] if keys else 0, _VALUES[0], _VALUES[1] if values else 1)


# Qwen3.5's files have the value heads of a delta net in another order.
_TILED = {
    _DELTA + f"{name}.weight": Change((_tiled(*at),))
    for name, at in {
        "in_proj_qkv": (0, True, True), "in_proj_z": (0, False, True), "in_proj_a": (0, False, False),
        "in_proj_b": (0, False, False), "conv1d": (0, True, True), "out_proj": (1, False, True),
    }.items()
} | {
    _DELTA + "A_log": Change((("log-",), _tiled(0, False, False))),
    _DELTA + "dt_bias": Change((_tiled(0, False, False),)),
}  # fmt: skip
_TURNS = in_layers(_DELTA, ssm_alpha="in_proj_a", ssm_beta="in_proj_b")
_MLP = LAYER + "feed_forward."
_FEED = in_layers(_MLP, ffn_gate="gate_proj", ffn_up="up_proj", ffn_down="down_proj")
_NEMOTRON = _BACKBONE + "mixer."
_NEMOTRON_FIELDS = FIELDS | {
    "feed_forward_length": "", "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups", "ssm.state_size": "ssm_state_size", "rope.scaling.finetuned": "",
    "rope.dimension_count": "", "rope.freq_base": "",
}  # fmt: skip
_NEMOTRON_NAMES = _MIXED | _mamba2(_NEMOTRON) | in_layers(
    _BACKBONE, attn_norm="norm", attn_q="mixer.q_proj", attn_k="mixer.k_proj", attn_v="mixer.v_proj",
    attn_output="mixer.o_proj", ffn_up="mixer.up_proj", ffn_down="mixer.down_proj",
)  # fmt: skip
_NEMOTRON_PRESENT = {"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"}
_GRANITE_MLP = LAYER + "shared_mlp."
_GRANITE_DENSE = {
    _GRANITE_MLP + "input_linear.weight": Change(
        (("halves",),), (_GRANITE_MLP + "gate.weight", _GRANITE_MLP + "up.weight")
    )
}

HYBRIDS: dict[str, tuple[Family, ...]] = {
    "mamba": (
        Family(
            "FalconMambaForCausalLM", _MAMBA_NAMES, _MAMBA_FIELDS, present=_MAMBA_PRESENT, changes=_MAMBA_CHANGES,
            when="ssm.dt_b_c_rms",
        ),
        Family("MambaForCausalLM", _MAMBA_NAMES, _MAMBA_FIELDS, present=_MAMBA_PRESENT, changes=_MAMBA_CHANGES),
    ),
    "mamba2": (
        Family(
            "Mamba2ForCausalLM", _MIXED | _mamba2(_BACKBONE + "mixer.") | in_layers(_BACKBONE, attn_norm="norm"),
            SIZES | _UNUSED | {
                "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups",
                "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "context_length": "",
            },
            present=_MAMBA_PRESENT, derived=(d.head_sizes,), changes=_MAMBA_CHANGES,
        ),
    ),
    "jamba": (
        Family(
            "JambaForCausalLM",
            ATTENTION | _FEED | _mamba(LAYER + "mamba.") | in_layers(
                LAYER, ffn_norm="pre_ff_layernorm", ssm_dt_norm="mamba.dt_layernorm", ssm_b_norm="mamba.b_layernorm",
                ssm_c_norm="mamba.c_layernorm", ffn_gate_inp="feed_forward.router",
                ffn_gate_exps="feed_forward.experts.{expert}.gate_proj",
                ffn_up_exps="feed_forward.experts.{expert}.up_proj",
                ffn_down_exps="feed_forward.experts.{expert}.down_proj",
            ) | {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
            FIELDS | {
                "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
                "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
                "ssm.time_step_rank": "mamba_dt_rank",
            },
            present={"mamba_proj_bias": "ssm_in.bias", "mamba_conv_bias": "ssm_conv1d.bias"},
            derived=(d.jamba_layers,), changes={LAYER + "mamba.A_log": _LOG},
        ),
    ),
    "granitehybrid": (
        Family(
            "GraniteMoeHybridForCausalLM",
            NAMES | GRANITE_EXPERTS | _mamba2(LAYER + "mamba.") | in_layers(
                _GRANITE_MLP, ffn_gate="gate", ffn_up="up", ffn_down="output_linear", ffn_gate_shexp="gate",
                ffn_up_shexp="up", ffn_down_shexp="output_linear",
            ),
            FIELDS | SCALES | {"expert_used_count": "num_experts_per_tok"},
            present={"attention_bias": "attn_q.bias", "mamba_proj_bias": "ssm_in.bias",
                     "mamba_conv_bias": "ssm_conv1d.bias"},
            derived=(d.attention_layers, d.mamba_sizes, d.dense_or_experts, d.rotary_positions, rotary),
            changes=GRANITE_STACKS | _GRANITE_DENSE | {LAYER + "mamba.A_log": _LOG}, interleaved=PERMUTED,
        ),
    ),
    "falcon-h1": (
        Family(
            "FalconH1ForCausalLM",
            ATTENTION | _FEED | _mamba2(LAYER + "mamba.") | {
                "token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head",
                "blk.ffn_norm": LAYER + "pre_ff_layernorm.weight",
                "blk.ffn_norm.weight": LAYER + "pre_ff_layernorm.weight",
            },
            # The multipliers of the config.json are in the file's numbers.
            FIELDS, settings={"mamba_norm_before_gate": False},
            present={"attention_bias": "attn_q.bias", "mamba_proj_bias": "ssm_in.bias",
                     "mamba_conv_bias": "ssm_conv1d.bias", "projectors_bias": "ssm_out.bias",
                     "mamba_rms_norm": "ssm_norm.weight"},
            derived=(d.mamba_sizes, rotary), changes={LAYER + "mamba.A_log": _LOG},
        ),
    ),
    "nemotron_h": (
        Family(
            "NemotronHForCausalLM", _NEMOTRON_NAMES, _NEMOTRON_FIELDS,
            present=_NEMOTRON_PRESENT | {"mlp_bias": "ffn_up.bias"}, derived=(d.nemotron_layers,),
            changes={_NEMOTRON + "A_log": _LOG}, interleaved=PERMUTED,
        ),
    ),
    "nemotron_h_moe": (
        Family(
            "NemotronHForCausalLM",
            _NEMOTRON_NAMES | in_layers(
                _NEMOTRON, ffn_gate_inp="gate", ffn_up_exps="experts.{expert}.up_proj",
                ffn_down_exps="experts.{expert}.down_proj", ffn_up_shexp="shared_experts.up_proj",
                ffn_down_shexp="shared_experts.down_proj", ffn_latent_down="fc1_latent_proj",
                ffn_latent_up="fc2_latent_proj",
            ) | {"blk.exp_probs_b.bias": _NEMOTRON + "gate.e_score_correction_bias"},
            _NEMOTRON_FIELDS | {
                "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
                "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
                "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group", "moe_latent_size": "moe_latent_size",
            },
            present=_NEMOTRON_PRESENT | {"mlp_bias": "ffn_up_shexp.bias"}, derived=(d.nemotron_layers,),
            changes={_NEMOTRON + "A_log": _LOG}, interleaved=PERMUTED, only={"expert_gating_func": 2},
        ),
    ),
    "lfm2": (
        Family(
            "Lfm2ForCausalLM",
            WHOLE | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"} | ATTENTION
            | in_layers(
                LAYER, attn_norm="operator_norm", attn_output="self_attn.out_proj",
                attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm", ffn_norm="ffn_norm",
                ffn_gate="feed_forward.w1", ffn_up="feed_forward.w3", ffn_down="feed_forward.w2",
                **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
            ),
            FIELDS | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
            settings={"block_auto_adjust_ff_dim": False}, present={"conv_bias": "shortconv.in_proj.bias"},
            derived=(d.attention_layers, rotary),
        ),
    ),
    "qwen3next": (
        Family(
            "Qwen3NextForCausalLM", _DELTA_NAMES | in_layers(_DELTA, ssm_ba="in_proj_ba"), _DELTA_FIELDS,
            settings={"norm_topk_prob": True}, present={"attention_bias": "attn_q.bias"},
            derived=(d.delta_layers, d.expert_width, d.shared_width, partly_rotary),
            changes=_DELTA_NORMS | {
                _DELTA + "A_log": _LOG,
                _DELTA + "in_proj_qkvz.weight": Change(
                    (("by key head", *_KEYS, *_VALUES),),
                    (_DELTA + "in_proj_qkv.weight", _DELTA + "in_proj_z.weight"),
                ),
            },
        ),
    ),
    "qwen35": (
        Family(
            "Qwen3_5ForCausalLM", _DELTA_NAMES | _TURNS, FIELDS | {"rope.dimension_sections": ""},
            present={"attention_bias": "attn_q.bias"}, derived=(d.delta_layers, partly_rotary),
            changes=_DELTA_NORMS | _TILED,
        ),
    ),
    "qwen35moe": (
        Family(
            "Qwen3_5MoeForCausalLM", _DELTA_NAMES | _TURNS,
            _DELTA_FIELDS | {"rope.dimension_sections": "", "feed_forward_length": ""},
            present={"attention_bias": "attn_q.bias"},
            derived=(d.delta_layers, d.expert_width, d.shared_width, partly_rotary), changes=_DELTA_NORMS | _TILED,
        ),
    ),
    "kimi-linear": (
        Family(
            "KimiLinearForCausalLM",
            NAMES | LATENT | SHARED_DENSE | in_layers(
                LAYER, ffn_gate_inp="block_sparse_moe.gate", ffn_gate_exps="block_sparse_moe.experts.{expert}.w1",
                ffn_up_exps="block_sparse_moe.experts.{expert}.w3",
                ffn_down_exps="block_sparse_moe.experts.{expert}.w2", ssm_beta="self_attn.b_proj",
                ssm_norm="self_attn.o_norm",
                **{f"ssm_{name}": f"self_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")},
                **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"},
            ) | {
                "blk.ssm_a": LAYER + "self_attn.A_log", "blk.ssm_dt.bias": LAYER + "self_attn.dt_bias",
                "blk.exp_probs_b.bias": LAYER + "block_sparse_moe.gate.e_score_correction_bias",
            },
            LATENT_FIELDS | ROUTED, derived=(d.all_heads, d.kimi_layers, d.latents, d.all_groups),
            changes=SPLIT | {LAYER + "self_attn.A_log": _LOG}, only={"expert_gating_func": 2},
        ),
    ),
}  # fmt: skip
"""By general.architecture; of several families the first one whose ``when`` holds."""
