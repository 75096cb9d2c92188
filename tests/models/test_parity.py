"""Every family against transformers on tiny random checkpoints: prefill logits and greedy tokens, float32, ragged.

The eager backend runs all of them; compiled, a few run here and the rest under ``-m slow``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from tests.models import driver
from tests.tiers import ON_GPU, both_tiers, draws

V, N_TOKENS, LENGTHS = 131, draws(12, 64), (1, 7, 64, 300)
# Weights are drawn widely so that logits are well apart: the two best differ by at least 2e-4, errors are below 1e-5.
LLAMA = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
HYBRID = ["linear_attention", "linear_attention", "full_attention"]
DELTA = {
    "head_dim": 32, "num_hidden_layers": 3, "layer_types": HYBRID, "linear_num_key_heads": 4,
    "linear_num_value_heads": 12, "linear_key_head_dim": 24, "linear_value_head_dim": 20,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}
IDS = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {
    "vocab_size": V, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.35,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OPT = {
    "vocab_size": V, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "init_std": 0.35, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPTJ = GPT2 | {"rotary_dim": 8}
GPT_NEO = IDS | {
    "hidden_size": 64, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 512, "window_size": 40,
    "attention_types": [[["global", "local"], 1], [["local"], 1]], "initializer_range": 0.25,
}  # fmt: skip
DENSE = IDS | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
# Of transformers, eager attention adds the bias twice: in the mask and to the scores.
FALCON_ALIBI = DENSE | {"alibi": True, "attn_implementation": "sdpa", "initializer_range": 0.2}
BLOOM = IDS | {"hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
MPT = IDS | {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512, "initializer_range": 0.3}
JAMBA = LLAMA | {"num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6}
MAMBA = IDS | {"hidden_size": 40, "num_hidden_layers": 3, "initializer_range": 0.3}
MAMBA2 = IDS | {
    "hidden_size": 48, "num_heads": 12, "head_dim": 8, "n_groups": 2, "state_size": 24, "num_hidden_layers": 3,
    "conv_kernel": 4, "expand": 2, "chunk_size": 8, "initializer_range": 0.3,
}  # fmt: skip
GRANITE_HYBRID = IDS | {
    "hidden_size": 48, "intermediate_size": 40, "shared_intermediate_size": 56, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 2,
    "mamba_d_state": 24, "mamba_chunk_size": 8, "initializer_range": 0.3, "num_local_experts": 5,
    "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
    "logits_scaling": 2.0, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
ATTENTION = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
# Published models have no least step. transformers takes the least one of training (see its pull request 48989), so
# configs here say that.
STEPS = {"time_step_min": 0.001, "time_step_limit": [0.001, float("inf")]}
NEMOTRON = IDS | ATTENTION | STEPS | {
    "head_dim": 12, "intermediate_size": 40, "mamba_num_heads": 12, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 24, "chunk_size": 8,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
}  # fmt: skip
NEMOTRON_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "routed_scaling_factor": 1.7,
    "moe_shared_expert_intermediate_size": 36,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe", "linear_attention"],
}  # fmt: skip
LFM2 = IDS | ATTENTION | {"intermediate_size": 60, "num_hidden_layers": 4, "block_multiple_of": 8}
FALCON = IDS | ATTENTION | {
    "intermediate_size": 60, "num_hidden_layers": 2, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_ssm": 96,
    "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 8,
}  # fmt: skip
ZAMBA2 = IDS | ATTENTION | STEPS | {
    "intermediate_size": 60, "num_hidden_layers": 6, "num_mem_blocks": 2, "adapter_rank": 5, "n_mamba_heads": 12,
    "mamba_ngroups": 2, "mamba_d_state": 24, "chunk_size": 8, "initializer_range": 0.15,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
}  # fmt: skip
ROUTED = {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 40, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
LATENTS = LLAMA | {
    "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
MLA = LATENTS | ROUTED
# Few heads would often leave scores of zero, of which transformers takes any.
INDEXED = MLA | {"index_topk": 8, "index_n_heads": 24, "index_head_dim": 20}
KIMI = IDS | ROUTED | {
    "hidden_size": 56, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "initializer_range": 0.2, "kv_lora_rank": 40, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 6, "v_head_dim": 20, "num_local_experts": 8, "linear_num_heads": 4, "linear_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
SHORT, LONG = [1.0 + 0.02 * i for i in range(8)], [1.5 + 0.4 * i for i in range(8)]
GROWN = 10000.0 * (8 * 512 / 100 - 7) ** (16 / 14)  # the base of dynamic NTK for 512 tokens and a factor of 8
MIXED = ["sliding_attention", "full_attention"]


def _rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


@dataclass(frozen=True)
class Arch:
    """One checkpoint to make. oracle: fields of the oracle's config, where frequencies are those of the engine's
    longest context, 512 tokens, and transformers' would change in the middle of a text. auto: the oracle is what
    AutoModel makes of the checkpoint, which may be of another class."""

    name: str
    model: str
    config: dict[str, Any]
    oracle: dict[str, Any] = field(default_factory=dict)
    auto: bool = False


ARCHS = (
    Arch("llama", "Llama", LLAMA),
    Arch("llama_tied_head_dim", "Llama", LLAMA | {"head_dim": 32, "tie_word_embeddings": True}),
    Arch("llama_biases", "Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    Arch("llama_linear", "Llama", LLAMA | _rope("linear", factor=3.0)),
    Arch("llama_dynamic", "Llama", LLAMA | _rope("dynamic", factor=8.0) | {"max_position_embeddings": 100},
         {"rope_parameters": {"rope_type": "default", "rope_theta": GROWN}}),
    Arch(
        "llama_llama3", "Llama",
        LLAMA | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=64),
    ),
    Arch("llama_yarn", "Llama", LLAMA | _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    Arch(
        "llama_yarn_mscale", "Llama",
        LLAMA | _rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=0.7,
                      truncate=False, beta_fast=16.0, beta_slow=2.0),
    ),
    Arch(
        "llama_longrope", "Llama",
        LLAMA | _rope("longrope", short_factor=SHORT, long_factor=LONG, factor=4.0,
                      original_max_position_embeddings=100),
        _rope("longrope", short_factor=LONG, long_factor=LONG, factor=4.0, original_max_position_embeddings=100),
    ),
    Arch("mistral", "Mistral", LLAMA | {"sliding_window": None}),
    Arch("mistral_window", "Mistral", LLAMA | {"sliding_window": 40}),
    Arch("mistral_layer_types", "Mistral", LLAMA | {"sliding_window": 40, "layer_types": MIXED[::-1]},
         auto=True),
    Arch("mistral_all_full", "Mistral", LLAMA | {"sliding_window": 40, "layer_types": MIXED[1:] * 2}, auto=True),
    Arch("ministral", "Ministral",
         LLAMA | _rope("default") | {"head_dim": 16, "sliding_window": 40, "layer_types": MIXED}),
    Arch("qwen2", "Qwen2", LLAMA),
    Arch("qwen2_some_windows", "Qwen2",
         LLAMA | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1,
                  "num_hidden_layers": 3, "tie_word_embeddings": True}),
    Arch("qwen3", "Qwen3", LLAMA | {"head_dim": 32}),
    Arch("qwen3_bias_layer_types", "Qwen3",
         LLAMA | {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 33,
                  "layer_types": MIXED}),
    Arch("gemma2", "Gemma2",
         LLAMA | {"head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 24, "num_hidden_layers": 3}),
    Arch("gemma2_untied_uncapped", "Gemma2",
         LLAMA | {"head_dim": 16, "tie_word_embeddings": False, "attn_logit_softcapping": None,
                  "final_logit_softcapping": None, "hidden_activation": "gelu", "query_pre_attn_scalar": 16}),
    Arch("gemma3", "Gemma3Text",
         LLAMA | {"head_dim": 32, "sliding_window": 40, "num_hidden_layers": 3, "layer_types": [*MIXED, MIXED[0]],
                  "rope_parameters": {
                      "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                      "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}}}),
    Arch("phi3", "Phi3", LLAMA),
    Arch("phi3_window_partial", "Phi3",
         LLAMA | _rope("default", partial_rotary_factor=0.5) | {"sliding_window": 40, "tie_word_embeddings": True}),
    Arch("phi3_longrope", "Phi3",
         LLAMA | {"original_max_position_embeddings": 100}
         | _rope("longrope", short_factor=SHORT[:6], long_factor=LONG[:6], partial_rotary_factor=0.75),
         _rope("longrope", short_factor=LONG[:6], long_factor=LONG[:6], partial_rotary_factor=0.75)),
    Arch("mixtral", "Mixtral", LLAMA | {"num_local_experts": 4}),
    Arch("mixtral_window", "Mixtral", LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 40}),
    Arch("qwen2_moe", "Qwen2Moe", LLAMA | EXPERTS | {"shared_expert_intermediate_size": 72}),
    Arch("qwen2_moe_some_dense", "Qwen2Moe",
         LLAMA | EXPERTS | {"shared_expert_intermediate_size": 40, "num_hidden_layers": 4, "decoder_sparse_step": 2,
                            "mlp_only_layers": [1], "norm_topk_prob": True}),
    Arch("qwen3_moe", "Qwen3Moe", LLAMA | EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    Arch("olmoe", "Olmoe", LLAMA | {"num_experts": 8, "num_experts_per_tok": 3}),
    Arch("granite", "Granite", LLAMA | SCALES),
    Arch("granite_moe", "GraniteMoe", LLAMA | SCALES | {"num_local_experts": 5, "num_experts_per_tok": 3}),
    Arch("phimoe", "Phimoe", LLAMA | {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True}),
    Arch("phimoe_longrope", "Phimoe",
         LLAMA | _rope("longrope", short_factor=SHORT, long_factor=LONG, factor=4.0, short_mscale=1.4, long_mscale=1.2,
                       original_max_position_embeddings=100)
         | {"num_local_experts": 4, "router_jitter_noise": 0.3},
         _rope("longrope", short_factor=LONG, long_factor=LONG, factor=4.0, short_mscale=1.2, long_mscale=1.2,
               original_max_position_embeddings=100)),
    Arch("gpt_oss", "GptOss",
         LLAMA | {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 3,
                  "sliding_window": 40, "swiglu_limit": 0.7}
         | _rope("yarn", factor=8.0, original_max_position_embeddings=64, truncate=False)),
    Arch("gpt_oss_no_bias", "GptOss",
         LLAMA | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_bias": False,
                  "layer_types": [*MIXED[::-1]], "sliding_window": 33}),
    Arch("qwen3_next", "Qwen3Next", LLAMA | EXPERTS | DELTA),
    Arch("qwen3_next_some_dense", "Qwen3Next",
         LLAMA | EXPERTS | DELTA | {"linear_num_key_heads": 12, "linear_conv_kernel_dim": 3, "num_hidden_layers": 4,
                                    "attention_bias": True, "decoder_sparse_step": 2, "mlp_only_layers": [1],
                                    "layer_types": [*HYBRID[::-1], "linear_attention"], "norm_topk_prob": False}),
    Arch("qwen3_5", "Qwen3_5Text", LLAMA | DELTA),
    Arch("qwen3_5_moe", "Qwen3_5MoeText", LLAMA | EXPERTS | DELTA),
    # Transformers stores the three convolutions in equal parts, whatever their sizes.
    Arch("olmo_hybrid", "OlmoHybrid",
         LLAMA | DELTA | {"linear_value_head_dim": 8, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
    Arch("olmo_hybrid_rotary", "OlmoHybrid",
         LLAMA | DELTA | {"linear_value_head_dim": 8, "linear_allow_neg_eigval": False, "attention_bias": True}),
    Arch("deepseek_v2", "DeepseekV2", MLA | {"topk_method": "group_limited_greedy"}),
    Arch("deepseek_v2_lite", "DeepseekV2",
         MLA | {"q_lora_rank": None, "n_shared_experts": 1, "n_group": None, "topk_group": None}
         | _rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.9, mscale_all_dim=0.7)),
    Arch("deepseek_v2_bias", "DeepseekV2", MLA | {"q_lora_rank": None, "attention_bias": True}),
    Arch("deepseek_v3", "DeepseekV3",
         MLA | _rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=1.0)),
    Arch("deepseek_v3_halves", "DeepseekV3",
         MLA | {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "n_group": 1,
                "topk_group": 1, "tie_word_embeddings": True}),
    Arch("deepseek_v32", "DeepseekV32", INDEXED),
    Arch("deepseek_v32_odd", "DeepseekV32",
         INDEXED | _rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=1.0)
         | {"index_topk": 5, "index_n_heads": 21, "index_head_dim": 12, "attention_bias": True, "n_group": 1,
            "topk_group": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    Arch("glm_moe_dsa", "GlmMoeDsa", INDEXED | {"n_group": 1, "topk_group": 1}),
    Arch("glm_moe_dsa_shared", "GlmMoeDsa",
         INDEXED | {"num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "full", "shared"]}),
    Arch("glm4_moe_lite", "Glm4MoeLite",
         MLA | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    Arch("youtu", "Youtu", LATENTS | {"tie_word_embeddings": True}),
    Arch("minicpm3", "MiniCPM3", LATENTS | {"scale_emb": 2.5, "scale_depth": 1.3, "dim_model_base": 40}),
    Arch("minicpm3_unscaled", "MiniCPM3",
         LATENTS | {"v_head_dim": None, "scale_depth": None, "dim_model_base": None, "tie_word_embeddings": False}),
    Arch("glm4_moe", "Glm4Moe", LLAMA | ROUTED | {"use_qk_norm": True, "attention_bias": True}),
    Arch("glm4_moe_yarn", "Glm4Moe",
         LLAMA | ROUTED | _rope("yarn", factor=4.0, original_max_position_embeddings=128, partial_rotary_factor=0.5)),
    Arch("dots1", "Dots1",
         LLAMA | ROUTED | {"sliding_window": 40, "max_window_layers": 1, "norm_topk_prob": True,
                           "attention_bias": True}),
    Arch("kimi_linear", "KimiLinear", KIMI),
    Arch("kimi_linear_listed", "KimiLinear",
         KIMI | {"linear_conv_kernel_dim": 3, "linear_num_heads": 12, "linear_head_dim": 20, "num_hidden_layers": 3,
                 "layer_types": None, "q_lora_rank": 28, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                 "linear_attn_config": {"full_attn_layers": [1, 3], "kda_layers": [2]}, "first_k_dense_replace": 2}),
    Arch("gpt2", "GPT2", GPT2),
    Arch("gpt2_untied", "GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "gelu"}),
    Arch("opt", "OPT", OPT),
    Arch("gptj", "GPTJ", GPTJ),
    Arch("gptj_tied", "GPTJ", GPTJ | {"tie_word_embeddings": True, "n_inner": 80, "rotary_dim": 16}),
    Arch("codegen", "CodeGen", GPTJ | {"n_head": 8, "rotary_dim": 6}),
    Arch("gpt_neo", "GPTNeo", GPT_NEO),
    Arch("gpt_neo_untied", "GPTNeo",
         GPT_NEO | {"tie_word_embeddings": False, "intermediate_size": 80, "num_layers": 2,
                    "attention_types": [[["global"], 2]]}),
    Arch("falcon", "Falcon", DENSE),
    Arch("falcon_grouped", "Falcon", DENSE | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    Arch("falcon_grouped_one_norm", "Falcon",
         DENSE | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
                  "ffn_hidden_size": 80, "tie_word_embeddings": False}),
    Arch("falcon_alibi", "Falcon",
         FALCON_ALIBI | {"multi_query": False, "parallel_attn": False, "bias": True}),
    Arch("falcon_alibi_single", "Falcon", FALCON_ALIBI | {"num_attention_heads": 8}),
    Arch("bloom", "Bloom", BLOOM),
    Arch("bloom_odd", "Bloom", BLOOM | {"n_head": 12, "hidden_size": 72, "tie_word_embeddings": False}),
    Arch("mpt", "Mpt", MPT),
    Arch("mpt_clipped", "Mpt",
         MPT | {"n_heads": 12, "d_model": 72, "tie_word_embeddings": False,
                "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.2}}),
    Arch("mamba", "Mamba", MAMBA),
    Arch("mamba_biases_untied", "Mamba",
         MAMBA | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "state_size": 8,
                  "time_step_rank": 5, "conv_kernel": 3, "residual_in_fp32": False}),
    Arch("falcon_mamba", "FalconMamba", MAMBA | {"intermediate_size": 56, "expand": 3, "mixer_rms_eps": 1e-3}),
    Arch("jamba", "Jamba", JAMBA),
    Arch("jamba_dense", "Jamba",
         JAMBA | {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_state": 24,
                  "mamba_dt_rank": 7, "mamba_d_conv": 2, "mamba_expand": 1, "tie_word_embeddings": True}),
    Arch("mamba2", "Mamba2", MAMBA2),
    Arch(
        "mamba2_odd", "Mamba2",
        MAMBA2 | {"n_groups": 1, "head_dim": 12, "num_heads": 8, "state_size": 7, "conv_kernel": 3, "use_bias": True,
                  "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    Arch("granite_hybrid", "GraniteMoeHybrid", GRANITE_HYBRID),
    Arch(
        "granite_hybrid_dense", "GraniteMoeHybrid",
        GRANITE_HYBRID
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_n_heads": 4,
           "mamba_d_head": "auto", "mamba_proj_bias": True,
           "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
    Arch("nemotron_h", "NemotronH", NEMOTRON),
    Arch("nemotron_h_biases", "NemotronH",
         NEMOTRON | {"use_bias": True, "mlp_bias": True, "time_step_min": 0.2, "time_step_limit": [0.2, float("inf")]}),
    Arch("nemotron_h_moe", "NemotronH", NEMOTRON | NEMOTRON_EXPERTS),
    Arch("nemotron_h_latent", "NemotronH",
         NEMOTRON | NEMOTRON_EXPERTS | {"moe_latent_size": 20, "mlp_bias": True, "norm_topk_prob": False, "n_group": 4,
                                        "topk_group": 2, "layers_block_type": ["moe", "full_attention", "moe"]}),
    Arch("lfm2", "Lfm2", LFM2 | {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    Arch("lfm2_bias", "Lfm2",
         LFM2 | {"full_attn_idxs": [0, 3], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
                 "tie_word_embeddings": False}),
    Arch("zamba2", "Zamba2", ZAMBA2),
    Arch("zamba2_rotary", "Zamba2",
         ZAMBA2 | {"use_mem_rope": True, "use_shared_attention_adapter": True, "add_bias_linear": True,
                   "num_mem_blocks": 1, "num_key_value_heads": 4, "mamba_ngroups": 1,
                   "layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3}),
    Arch("falcon_h1", "FalconH1", FALCON),
    Arch("falcon_h1_scaled", "FalconH1",
         FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True,
                   "projectors_bias": True, "key_multiplier": 0.6, "attention_in_multiplier": 1.3,
                   "attention_out_multiplier": 0.8, "ssm_in_multiplier": 0.7, "ssm_out_multiplier": 1.2,
                   "ssm_multipliers": [0.9, 1.1, 0.8, 1.3, 0.5], "mlp_multipliers": [0.7, 1.4],
                   "embedding_multiplier": 2.0, "lm_head_multiplier": 1.5}),
    Arch("falcon_h1_normed", "FalconH1", FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 1}),
)  # fmt: skip
# Sinks, windows and latents in the middle of a prompt; states that go on.
RECURRENT = {
    "mamba", "falcon_mamba", "jamba", "olmo_hybrid", "mamba2", "granite_hybrid", "nemotron_h", "lfm2", "falcon_h1",
    "qwen3_next", "qwen3_5", "kimi_linear",
}  # fmt: skip
CHUNKED = {
    "gpt_oss", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_shared", "mamba", "jamba", "mamba2", "lfm2", "falcon_h1",
    "qwen3_next", "kimi_linear", "gpt_neo", "falcon_alibi", "bloom", "mpt",
}  # fmt: skip
CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}


def _build(arch: Arch, fields: dict[str, Any]) -> transformers.PreTrainedModel:
    torch.manual_seed(sum(map(ord, arch.name)))
    config = getattr(transformers, f"{arch.model}Config")(**{"attn_implementation": "eager"} | fields)
    model = getattr(transformers, CLASSES.get(arch.model, f"{arch.model}ForCausalLM"))(config).eval()
    with torch.no_grad():  # weights that start as constants would hide a mix-up of norms or biases
        for name, p in model.named_parameters():
            if p.dim() == 1 or name.endswith("A_log"):
                p += 0.2 * torch.randn(p.shape)
            if "post_feedforward" in name:  # let layers outweigh the tied embedding, or every token repeats itself
                p += 3.0
        for name, b in model.named_buffers():  # a correction of the choice of experts, too
            if name.endswith("e_score_correction_bias"):
                b += 0.2 * torch.randn(b.shape)
    for module in model.modules():  # GptOssExperts: before 5.2x, transformers takes 7 whatever the config says
        if hasattr(module, "limit"):
            module.limit = config.swiglu_limit
        # Before 5.2x, transformers takes the mean square of a whole row whatever the number of groups.
        if type(module).__name__ in ("MambaRMSNormGated", "GraniteMoeHybridRMSNormGated"):
            groups = getattr(config, "n_groups", None) or config.mamba_n_groups
            if not hasattr(module, "group_size") and groups > 1:
                module.forward = functools.partial(_grouped_norm, module, groups)
        if type(module).__name__ == "FalconDecoderLayer" and config.alibi:
            module.forward = functools.partial(_exact_bias, module.forward)
    return model


def _exact_bias(forward: Callable[..., Any], x: Tensor, attention_mask: Tensor, **rest: Any) -> Any:
    """A layer of Falcon with ALiBi as it is: transformers rounds slopes times positions to bfloat16 in every dtype."""
    heads, _, length = attention_mask.shape[1:]
    slopes = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, :, 1:]
    bias = slopes * torch.arange(length) * (x.shape[-1] // heads) ** -0.5
    return forward(x, attention_mask=torch.where(attention_mask < -1e30, attention_mask, bias), **rest)


def _grouped_norm(module: torch.nn.Module, groups: int, x: Tensor, gate: Tensor) -> Tensor:
    """A gated norm whose groups have a mean square each."""
    wide = (x.float() * torch.nn.functional.silu(gate.float())).unflatten(-1, (groups, -1))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * normed.flatten(-2).to(x.dtype)


def _forced(model: transformers.PreTrainedModel, prompt: list[int], drawn: list[int]) -> Tensor:
    """Logits [n, V] from which each drawn token had to be chosen: one pass over the prompt and the drawn ones."""
    ids = torch.tensor([prompt + drawn[:-1]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 :]


# Two layer kinds with both caps and windows; learned positions and LayerNorm; grouped queries with a changing table.
SECOND = {"gemma2", "gpt2", "llama_dynamic"}  # compiled for a CPU, in the second tier
PREBUILT = SECOND | {"gpt_oss"}  # of prebuilt kernels, in the first tier
# Of each family one, and of each kind of rotary embedding: in the first tier, and on a GPU.
EACH = {
    "llama_biases", "llama_dynamic", "llama_llama3", "llama_yarn_mscale", "mistral_layer_types", "qwen2", "qwen3",
    "gemma2", "gemma3", "phi3_longrope", "mixtral_window", "qwen2_moe_some_dense", "qwen3_moe", "olmoe", "granite",
    "granite_moe", "phimoe_longrope", "gpt_oss", "qwen3_next", "qwen3_5", "gpt2", "opt", "mamba", "falcon_mamba",
    "jamba", "olmo_hybrid", "mamba2", "granite_hybrid", "nemotron_h", "lfm2", "falcon_h1",
    "zamba2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_shared", "minicpm3", "glm4_moe",
    "kimi_linear", "gptj", "codegen", "gpt_neo", "falcon_grouped", "falcon_alibi", "bloom_odd", "mpt_clipped",
}  # fmt: skip


# References that go through tokens one by one on the host: in the second tier, but for two families.
LOOPS = {"mamba", "falcon_mamba", "granite_hybrid", "nemotron_h", "falcon_h1", "qwen3_next", "qwen3_5", "olmo_hybrid",
         "zamba2"}  # fmt: skip


def _marks(backend: str, name: str) -> list[pytest.MarkDecorator]:
    if backend == "eager":
        return [] if name in EACH - LOOPS else [pytest.mark.thorough]
    if backend == "prebuilt":
        return [] if name in PREBUILT else [pytest.mark.thorough]
    if ON_GPU and name in EACH:
        return [pytest.mark.gpu]
    return [pytest.mark.thorough if name in SECOND and not ON_GPU else pytest.mark.slow]


RUNS = [(backend, arch) for backend in ("eager", "prebuilt", "inductor") for arch in ARCHS]


def saved_oracle(arch: Arch, folder: Path) -> torch.nn.Module:
    """Save a checkpoint of a family; what it is compared with."""
    _build(arch, arch.config).save_pretrained(folder)
    if arch.auto:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return _build(arch, arch.config | arch.oracle)


@pytest.mark.parametrize(
    ("backend", "arch"),
    [
        pytest.param(
            b,
            a,
            id=f"{b}-{a.name}",
            marks=_marks(b, a.name),
        )
        for b, a in RUNS
    ],
)
@torch.no_grad()
def test_parity(backend: str, arch: Arch, tmp_path: Path) -> None:
    model = saved_oracle(arch, tmp_path)
    runner = driver.Driver(tmp_path, backend, target="cuda" if ON_GPU and backend == "inductor" else "cpu")
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(V, (n,), generator=draw).tolist() for n in LENGTHS]
    logits, tokens = runner.generate(prompts, N_TOKENS)
    for i, prompt in enumerate(prompts):
        expected = _forced(model, prompt, tokens[i])
        torch.testing.assert_close(logits[i], expected[0], atol=1e-4, rtol=0)
        assert tokens[i] == expected.argmax(-1).tolist()
        alone_logits, alone_tokens = runner.generate([prompt], N_TOKENS)
        torch.testing.assert_close(alone_logits[0], expected[0], atol=1e-4, rtol=0)
        assert alone_tokens[0] == tokens[i]
    assert len({t for row in tokens for t in row}) > 8, "the checkpoint repeats itself, which tests little"
    if arch.name in CHUNKED:
        torch.testing.assert_close(runner.chunked(prompts[-1], 47), logits[-1], atol=1e-4, rtol=0)
    if arch.name in RECURRENT and both_tiers():
        some = prompts[-1][:37]
        expected = model(torch.tensor([some]), use_cache=False).logits[0, -1]
        for chunk in range(1, 18):
            torch.testing.assert_close(runner.chunked(some, chunk), expected, atol=1e-4, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
@torch.no_grad()
def test_steps_may_be_short(name: str, tmp_path: Path) -> None:
    """As published configs say: without a least step, whatever time_step_min is."""
    arch = next(a for a in ARCHS if a.name == name)
    model = _build(arch, {n: v for n, v in arch.config.items() if n not in STEPS})
    mixers = [module for module in model.modules() if hasattr(module, "dt_bias")]
    for mixer in mixers:
        mixer.dt_bias -= 6.0
        mixer.time_step_limit = (0.0, float("inf"))
    model.save_pretrained(tmp_path)
    prompt = torch.randint(V, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    (logits,), (drawn,) = driver.Driver(tmp_path, "eager").generate([prompt], 4)
    expected = _forced(model, prompt, drawn)
    torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=0)
    for mixer in mixers:
        mixer.time_step_limit = (0.001, float("inf"))
    assert (_forced(model, prompt, drawn) - expected).abs().max() > 1e-3
