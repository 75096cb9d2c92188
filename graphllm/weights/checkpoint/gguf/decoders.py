"""GGUF's architectures of decoders with attention in every layer: what their files call settings and tensors.

Names are those of the package `gguf` (tests/weights/test_gguf_families.py compares). What the files' numbers differ in
is as llama.cpp's converter (convert_hf_to_gguf.py, of August 2026) makes them.
"""

from __future__ import annotations

from typing import Any

from graphllm.weights.checkpoint.gguf import derived as d
from graphllm.weights.checkpoint.gguf.family import Change, Family, in_layers
from graphllm.weights.checkpoint.gguf.rotary import latent_rotary, partly_rotary, rotary, two_bases

LAYER = "model.layers.{layer}."
SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
}  # fmt: skip
FIELDS = SIZES | {
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
ROUTED = EXPERTS | {
    "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = in_layers(
    LAYER, attn_norm="input_layernorm", attn_q="self_attn.q_proj", attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj", attn_output="self_attn.o_proj", attn_q_norm="self_attn.q_norm",
    attn_k_norm="self_attn.k_norm",
)  # fmt: skip
DENSE = in_layers(LAYER, ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
NAMES = WHOLE | ATTENTION | DENSE | in_layers(LAYER, ffn_norm="post_attention_layernorm")
STACKS = in_layers(
    LAYER, ffn_gate_inp="mlp.gate", ffn_gate_exps="mlp.experts.{expert}.gate_proj",
    ffn_up_exps="mlp.experts.{expert}.up_proj", ffn_down_exps="mlp.experts.{expert}.down_proj",
    ffn_gate_up_exps=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
)  # fmt: skip
SHARED_DENSE = in_layers(
    LAYER, ffn_gate_shexp="mlp.shared_experts.gate_proj", ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj",
) | {"blk.exp_probs_b.bias": LAYER + "mlp.gate.e_score_correction_bias"}  # fmt: skip
SHARED = in_layers(
    LAYER, ffn_gate_shexp="mlp.shared_expert.gate_proj", ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj", ffn_gate_inp_shexp="mlp.shared_expert_gate",
)  # fmt: skip
# Mixtral's names of experts, and PhiMoE's.
_MIXTRAL = in_layers(
    LAYER, ffn_gate_inp="block_sparse_moe.gate", ffn_gate_exps="block_sparse_moe.experts.{expert}.w1",
    ffn_up_exps="block_sparse_moe.experts.{expert}.w3", ffn_down_exps="block_sparse_moe.experts.{expert}.w2",
)  # fmt: skip
# Granite's experts, which its checkpoints stack: gates and ups are one matrix.
_MOE = LAYER + "block_sparse_moe."
GRANITE_EXPERTS = in_layers(
    _MOE, ffn_gate_inp="router.layer", ffn_gate_exps="experts.{expert}.gate", ffn_up_exps="experts.{expert}.up",
    ffn_down_exps="experts.{expert}.down",
)  # fmt: skip
GRANITE_STACKS = {
    _MOE + "input_linear.weight": Change(
        (("stacked", "num_local_experts"),),
        (_MOE + "experts.{expert}.gate.weight", _MOE + "experts.{expert}.up.weight"),
    ),
    _MOE + "output_linear.weight": Change(
        (("stacked", "num_local_experts"),), (_MOE + "experts.{expert}.down.weight",)
    ),
}
PERMUTED = ("attn_q", "attn_k")
_HALVES = (("heads", "head_dim"),)
_BIASES = {LAYER + f"self_attn.{name}_proj.bias": Change(_HALVES) for name in "qk"}
_LLAMA: dict[str, Any] = {"interleaved": PERMUTED, "changes": _BIASES}
_LESS_ONE = Change((("-1",),))
# Gemma's norms multiply by one more than the checkpoint has.
_GEMMA_NORMS = {
    LAYER + f"{name}.weight": _LESS_ONE
    for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm")
} | {"model.norm.weight": _LESS_ONE}  # fmt: skip
_GEMMA_NAMES = NAMES | in_layers(
    LAYER, post_attention_norm="post_attention_layernorm", ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)  # fmt: skip
# Files have one head of keys and values, the latent.
LATENT_FIELDS = {k: v for k, v in FIELDS.items() if k != "attention.key_length"} | {"attention.head_count_kv": ""}
LATENT = in_layers(
    LAYER, attn_q_a="self_attn.q_a_proj", attn_q_a_norm="self_attn.q_a_layernorm", attn_q_b="self_attn.q_b_proj",
    attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa", attn_kv_a_norm="self_attn.kv_a_layernorm",
    attn_kv_b="self_attn.kv_b_proj", attn_k_b="self_attn.k_b_proj", attn_v_b="self_attn.v_b_proj",
)  # fmt: skip
# Newer files have what keys are made of, transposed, apart from what values are made of.
SPLIT = {
    LAYER + "self_attn.kv_b_proj.weight": Change(
        (("key and value", "num_attention_heads", "qk_nope_head_dim", "v_head_dim"),),
        (LAYER + "self_attn.k_b_proj.weight", LAYER + "self_attn.v_b_proj.weight"),
    )
}
_OSS = LAYER + "mlp.experts."
_OSS_PARTS = {name: f"{_OSS}{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")}
_DEEPSEEK: dict[str, Any] = {
    "names": NAMES | LATENT | STACKS | SHARED_DENSE,
    "fields": LATENT_FIELDS | ROUTED,
    "present": {"attention_bias": "attn_output.bias"},
    "derived": (d.all_heads, d.latents, d.all_groups, latent_rotary),
    "changes": SPLIT,
}
_INDEXED: dict[str, Any] = _DEEPSEEK | {
    "names": _DEEPSEEK["names"] | {
        f"blk.indexer.{own}": f"{LAYER}self_attn.indexer.{name}"
        for own, name in {"attn_q_b": "wq_b", "attn_k": "wk", "k_norm": "k_norm", "proj": "weights_proj"}.items()
    },
    "fields": _DEEPSEEK["fields"] | {
        "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    },
    "only": {"expert_gating_func": 2},
}  # fmt: skip

DECODERS: dict[str, tuple[Family, ...]] = {
    "llama": (
        Family(
            "MixtralForCausalLM", NAMES | _MIXTRAL, FIELDS | EXPERTS | {"expert_count": "num_local_experts"},
            settings={"sliding_window": None}, derived=(rotary,), interleaved=PERMUTED, when="expert_count",
        ),
        Family(
            "LlamaForCausalLM", NAMES, FIELDS, present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
            derived=(rotary,), only={"expert_count": 0}, **_LLAMA,
        ),
    ),
    "qwen2": (Family("Qwen2ForCausalLM", NAMES, FIELDS, derived=(rotary,)),),
    "qwen2moe": (
        Family(
            "Qwen2MoeForCausalLM", NAMES | STACKS | SHARED,
            FIELDS | EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            settings={"norm_topk_prob": False}, derived=(d.expert_width, d.shared_width, rotary),
        ),
    ),
    "qwen3": (
        Family("Qwen3ForCausalLM", NAMES, FIELDS, present={"attention_bias": "attn_q.bias"}, derived=(rotary,)),
    ),
    "qwen3moe": (
        Family(
            "Qwen3MoeForCausalLM", NAMES | STACKS, FIELDS | EXPERTS, settings={"norm_topk_prob": True},
            present={"attention_bias": "attn_q.bias"}, derived=(d.expert_width, rotary),
        ),
    ),
    "olmoe": (
        Family(
            "OlmoeForCausalLM", NAMES | STACKS,
            FIELDS | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
            settings={"norm_topk_prob": False}, derived=(rotary,),
        ),
    ),
    "gemma2": (
        Family(
            "Gemma2ForCausalLM", _GEMMA_NAMES,
            FIELDS | {
                "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            derived=(d.query_scale, rotary), changes=_GEMMA_NORMS,
        ),
    ),
    "gemma3": (
        Family(
            "Gemma3ForCausalLM", _GEMMA_NAMES,
            FIELDS | {
                "attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping",
            },
            derived=(d.query_scale, d.window_pattern, two_bases), changes=_GEMMA_NORMS,
        ),
    ),
    "phi3": (
        Family(
            "Phi3ForCausalLM",
            WHOLE | ATTENTION | in_layers(
                LAYER, attn_qkv="self_attn.qkv_proj", ffn_norm="post_attention_layernorm", ffn_up="mlp.gate_up_proj",
                ffn_down="mlp.down_proj",
            ),
            FIELDS, derived=(d.no_window, partly_rotary),
        ),
    ),
    "phimoe": (
        Family(
            "PhimoeForCausalLM", NAMES | _MIXTRAL,
            FIELDS | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            present={"attention_bias": "attn_q.bias"}, derived=(d.no_window, d.head_bias, rotary),
        ),
    ),
    "gpt-oss": (
        Family(
            "GptOssForCausalLM",
            NAMES | in_layers(
                LAYER, post_attention_norm="post_attention_layernorm", ffn_gate_inp="mlp.router",
                ffn_gate_exps="mlp.experts.{expert}.gate_proj", ffn_up_exps="mlp.experts.{expert}.up_proj",
                ffn_down_exps="mlp.experts.{expert}.down_proj",
            ) | {
                "blk.attn_sinks.weight": LAYER + "self_attn.sinks",
                "blk.ffn_gate_exps.bias": _OSS + "gate_proj_bias", "blk.ffn_up_exps.bias": _OSS + "up_proj_bias",
                "blk.ffn_down_exps.bias": _OSS + "down_proj_bias",
            },
            FIELDS | {
                "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window",
            },
            present={"attention_bias": "attn_q.bias"}, derived=(rotary, d.untruncated),
            changes={
                _OSS + "gate_up_proj": Change(
                    (("stacked by turns", "num_local_experts"),), (_OSS_PARTS["gate"], _OSS_PARTS["up"])
                ),
                _OSS + "down_proj": Change((("stacked transposed", "num_local_experts"),), (_OSS_PARTS["down"],)),
                _OSS + "gate_up_proj_bias": Change((("by turns",),), (_OSS + "gate_proj_bias", _OSS + "up_proj_bias")),
            },
        ),
    ),
    "granite": (
        Family(
            "GraniteForCausalLM", NAMES, FIELDS | SCALES,
            present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}, derived=(rotary,), **_LLAMA,
        ),
    ),
    "granitemoe": (
        Family(
            "GraniteMoeForCausalLM", NAMES | GRANITE_EXPERTS,
            FIELDS | SCALES | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            present={"attention_bias": "attn_q.bias"}, derived=(rotary,), interleaved=PERMUTED,
            changes=_BIASES | GRANITE_STACKS,
        ),
    ),
    "deepseek2": (
        Family("DeepseekV3ForCausalLM", when="blk.exp_probs_b.bias", only={"expert_gating_func": 2}, **_DEEPSEEK),
        Family(
            "DeepseekV2ForCausalLM", when="expert_count", only={"expert_gating_func": 1},
            settings={"norm_topk_prob": False},
            **_DEEPSEEK | {"derived": (*_DEEPSEEK["derived"], d.grouped_experts)},
        ),
        Family("DeepseekV3ForCausalLM", settings={"n_routed_experts": None}, **_DEEPSEEK),
    ),
    "deepseek32": (Family("DeepseekV32ForCausalLM", **_INDEXED),),
    "glm-dsa": (
        Family("GlmMoeDsaForCausalLM", **_INDEXED | {"derived": (*_INDEXED["derived"], d.indexed_layers)}),
    ),
    "minicpm3": (
        Family(
            "MiniCPM3ForCausalLM", NAMES | LATENT, LATENT_FIELDS,
            # llama.cpp has these for all files.
            settings={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
            derived=(d.all_heads, d.latents, rotary),
        ),
    ),
    "glm4moe": (
        Family(
            "Glm4MoeForCausalLM",
            NAMES | STACKS | SHARED_DENSE | in_layers(LAYER, post_attention_norm="post_attention_layernorm"),
            FIELDS | ROUTED, present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
            derived=(d.expert_width, partly_rotary), only={"expert_gating_func": 2},
        ),
    ),
    "dots1": (
        Family(
            "Dots1ForCausalLM", NAMES | STACKS | SHARED_DENSE, FIELDS | ROUTED, settings={"sliding_window": None},
            present={"attention_bias": "attn_q.bias"}, derived=(d.expert_width, rotary), only={"expert_gating_func": 2},
        ),
    ),
    "gpt2": (
        Family(
            "GPT2LMHeadModel",
            {
                "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
                "output": "lm_head",
            } | in_layers(
                "transformer.h.{layer}.", attn_norm="ln_1", attn_qkv="attn.c_attn", attn_output="attn.c_proj",
                ffn_norm="ln_2", ffn_up="mlp.c_fc", ffn_down="mlp.c_proj",
            ),
            {
                "block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd",
                "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon",
                "feed_forward_length": "",
            },
            derived=(d.inner_width,),
            changes={
                f"transformer.h.{{layer}}.{name}.weight": Change((("transposed",),))
                for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            },
        ),
    ),
}  # fmt: skip
"""By general.architecture; of several families the first one whose ``when`` holds."""
