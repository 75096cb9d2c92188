"""Reading ``config.json``: published files as transformers reads them, rotary frequencies, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graphllm.config import ConfigError, EngineArgs, key_fields
from graphllm.config.fields import MAX_MODEL_LEN
from graphllm.ir.registry import load_models
from graphllm.loading.artifact.resolve import compile_config
from graphllm.ops.attention.rope_table import Rope

MODELS = load_models()

# What the files of well-known checkpoints say, in the formats of their time.
PUBLISHED: dict[str, tuple[type, dict[str, Any]]] = {
    "llama-2-7b": (transformers.LlamaConfig, {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
        "vocab_size": 32000}),
    "llama-3.2-1b": (transformers.LlamaConfig, {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256}),
    "mistral-7b-v0.1": (transformers.MistralConfig, {
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000}),
    "qwen2.5-7b-yarn": (transformers.Qwen2Config, {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064}),
    "qwen3-0.6b": (transformers.Qwen3Config, {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936}),
    "gemma-2-2b": (transformers.Gemma2Config, {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000}),
    "gemma-3-1b": (transformers.Gemma3TextConfig, {
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144}),
    "phi-3.5-mini": (transformers.Phi3Config, {
        "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [1.0 + 1.3 * i for i in range(48)], "type": "longrope",
                         "short_factor": [1.0 + 0.04 * i for i in range(48)]},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064}),
    "phi-4-mini": (transformers.Phi3Config, {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [1.0 + 1.1 * i for i in range(48)], "type": "longrope",
                         "short_factor": [1.0] * 48},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064}),
    "gpt-oss-20b-yarn": (transformers.GptOssConfig, {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                         "original_max_position_embeddings": 4096, "truncate": False},
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088}),
    "qwen3-next-80b": (transformers.Qwen3NextConfig, {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
        "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
        "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936}),
    "deepseek-v2-lite": (transformers.DeepseekV2Config, {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102400}),
    "deepseek-v3": (transformers.DeepseekV3Config, {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280}),
    "deepseek-v3.2": (transformers.DeepseekV32Config, {
        "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280}),
    "glm-5": (transformers.GlmMoeDsaConfig, {
        "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 202752,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 256, "vocab_size": 154880}),
    "gpt2": (transformers.GPT2Config, {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}),
    "opt-125m": (transformers.OPTConfig, {
        "activation_function": "relu", "architectures": ["OPTForCausalLM"], "do_layer_norm_before": True,
        "ffn_dim": 3072, "hidden_size": 768, "max_position_embeddings": 2048, "num_attention_heads": 12,
        "num_hidden_layers": 12, "vocab_size": 50272, "word_embed_proj_dim": 768}),
}  # fmt: skip

PUBLISHED_RECURRENT: dict[str, tuple[type, dict[str, Any]]] = {
    "mamba-2.8b-hf": (transformers.MambaConfig, {
        "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "d_inner": 5120, "d_model": 2560,
        "eos_token_id": 0, "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.1, "intermediate_size": 5120, "layer_norm_epsilon": 1e-05, "model_type": "mamba",
        "n_layer": 64, "num_hidden_layers": 64, "pad_token_id": 0, "pad_vocab_size_multiple": 8,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {},
        "state_size": 16, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_rank": 160, "time_step_scale": 1.0, "use_bias": False, "use_cache": True,
        "use_conv_bias": True, "vocab_size": 50280}),
    "falcon-mamba-7b": (transformers.FalconMambaConfig, {
        "architectures": ["FalconMambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 11,
        "expand": 16, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 8192,
        "layer_norm_epsilon": 1e-05, "mixer_rms_eps": 1e-06, "model_type": "falcon_mamba", "num_hidden_layers": 64,
        "pad_token_id": 11, "residual_in_fp32": True, "state_size": 16, "tie_word_embeddings": False,
        "time_step_rank": 256, "use_bias": False, "use_conv_bias": True, "use_falcon_mambapy": False,
        "vocab_size": 65024}),
    "jamba-v0.1": (transformers.JambaConfig, {
        "architectures": ["JambaForCausalLM"], "attn_layer_offset": 4, "attn_layer_period": 8,
        "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True, "mamba_proj_bias": False,
        "max_position_embeddings": 262144, "model_type": "jamba", "n_ctx": 262144, "num_attention_heads": 32,
        "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_logits_to_keep": 1, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_mamba_kernels": True, "vocab_size": 65536}),
}  # fmt: skip


@pytest.mark.parametrize("leave_out", [(), ("expand", "time_step_rank", "mamba_dt_rank", "tie_word_embeddings")])
@pytest.mark.parametrize("name", PUBLISHED_RECURRENT)
def test_recurrent_files_mean_what_transformers_reads(name: str, leave_out: tuple[str, ...]) -> None:
    cls, hf = PUBLISHED_RECURRENT[name]
    hf = {n: v for n, v in hf.items() if n not in leave_out}
    model, theirs = MODELS[hf["architectures"][0]], cls.from_dict(dict(hf))
    c = model.config(hf)
    fields: dict[str, str] = {}
    if name == "jamba-v0.1":
        fields = {"H": "num_attention_heads", "K": "num_key_value_heads", "F": "intermediate_size", "X": "num_experts",
                  "A": "num_experts_per_tok", "N": "mamba_d_state", "R": "mamba_dt_rank", "W": "mamba_d_conv",
                  "max_len": "max_position_embeddings", "eps": "rms_norm_eps", "bias": "mamba_proj_bias"}  # fmt: skip
        assert theirs.mamba_expand * theirs.hidden_size == c.M
        kinds = zip(theirs.layers_block_type, theirs.layers_num_experts, strict=True)
        assert list(c.layer_types) == [kind + ("_sparse" if count > 1 else "") for kind, count in kinds]
    else:
        fields = {"M": "intermediate_size", "N": "state_size", "R": "time_step_rank", "W": "conv_kernel",
                  "eps": "layer_norm_epsilon", "bias": "use_bias", "conv_bias": "use_conv_bias",
                  "wide": "residual_in_fp32"}  # fmt: skip
        assert c.mixer_eps == getattr(theirs, "mixer_rms_eps", 0.0)
    fields |= {"D": "hidden_size", "V": "vocab_size", "tied": "tie_word_embeddings"}
    assert {n: getattr(c, n) for n in fields} == {n: getattr(theirs, field) for n, field in fields.items()}
    assert len(model.graphs[0].layer_types(c)) == theirs.num_hidden_layers
    assert key_fields(c)["D"] == c.D


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("mamba-2.8b-hf", {"rms_norm": False}, "rms_norm is False, which is not supported"),
        ("mamba-2.8b-hf", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mamba-2.8b-hf", {"conv_kernel": 1}, "conv_kernel"),
        ("mamba-2.8b-hf", {"state_size": 512}, "state_size"),
        ("mamba-2.8b-hf", {"time_step_rank": "most"}, "time_step_rank"),
        ("jamba-v0.1", {"attn_layer_offset": 8}, "attn_layer_offset is 8.*below the period, 8"),
        ("jamba-v0.1", {"expert_layer_offset": 2}, "expert_layer_offset is 2.*below the period, 2"),
        ("jamba-v0.1", {"num_experts_per_tok": 17}, "num_experts_per_tok is 17"),
        ("jamba-v0.1", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms is False"),
        ("jamba-v0.1", {"sliding_window": 64}, "sliding_window is 64"),
    ],
)
def test_recurrent_files_that_are_refused(name: str, given: dict[str, Any], message: str) -> None:
    hf = PUBLISHED_RECURRENT[name][1] | given
    with pytest.raises(ConfigError, match=message):
        MODELS[hf["architectures"][0]].config(hf)


def test_a_model_that_counts_no_tokens() -> None:
    """It has vLLM's context if the user gives none, and any that the user gives."""
    for length, expected in ((None, 2048), (1_000_000, 1_000_000)):
        hf = PUBLISHED_RECURRENT["mamba-2.8b-hf"][1]
        config = compile_config(hf, EngineArgs(target="cpu", max_model_len=length))
        assert config.max_model_len == expected <= MODELS["MambaForCausalLM"].config(hf).max_len


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_mean_what_transformers_reads(name: str) -> None:
    cls, hf = PUBLISHED[name]
    model, theirs = MODELS[hf["architectures"][0]], cls.from_dict(dict(hf))
    c = model.config(hf)
    D, H = theirs.hidden_size, theirs.num_attention_heads
    K = getattr(theirs, "num_key_value_heads", H)
    assert (D, H, K, theirs.vocab_size) == (c.D, c.H, c.K, c.V)
    assert getattr(theirs, "head_dim", D // H) == c.E
    assert c.tied == theirs.tie_word_embeddings
    assert len(model.graphs[0].layer_types(c)) == theirs.num_hidden_layers
    assert c.max_len == max(theirs.max_position_embeddings, 131072 if "yarn" in name else 0)
    if hasattr(theirs, "layer_types"):
        types = [t.removesuffix("_sparse") for t in model.graphs[0].layer_types(c)]
        assert types == [t.removesuffix("_attention") for t in theirs.layer_types]
    if (getattr(theirs, "sliding_window", None) or 0) and "sliding" in model.graphs[0].layer_types(c):
        assert c.window == theirs.sliding_window
    assert hash(c) is not None
    assert key_fields(c)["D"] == D


@pytest.mark.parametrize("name", [n for n in PUBLISHED if n not in ("gpt2", "opt-125m")])
def test_frequencies(name: str) -> None:
    cls, hf = PUBLISHED[name]
    theirs = cls.from_dict(dict(hf))
    c = MODELS[hf["architectures"][0]].config(hf)
    if name == "gemma-3-1b":
        for rope, layer_type in ((c.rope, "full_attention"), (c.local_rope, "sliding_attention")):
            assert rope is not None
            _check_row(rope.inv_freq, _default(theirs.rope_parameters[layer_type]["rope_theta"], 256))
        return
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        part = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
        _check_row(c.rope.inv_freq, _default(theirs.rope_parameters["rope_theta"], int(c.E * part)))
        return
    for length in (4096, 131072):  # of LongRoPE, both sides of the border
        rope = MODELS[hf["architectures"][0]].config({**hf, MAX_MODEL_LEN: length}).rope
        expected, scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
        _check_row(rope.inv_freq, expected)
        assert rope.scale == pytest.approx(scale, rel=1e-12)
        assert rope.long == (kind == "longrope" and length > 4096)


def _default(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)


def _check_row(row: tuple[float, ...], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(row), expected, rtol=3e-7, atol=0)


_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
    "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
    "linear_attn_config": {"full_attn_layers": _FULL, "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
                           "kda_layers": [i for i in range(1, 28) if i not in _FULL]},
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


@pytest.mark.parametrize("leave_out", ["", "linear_attn_config", "first_k_dense_replace", "num_experts_per_token"])
def test_kimi_linear_files_mean_what_transformers_reads(leave_out: str) -> None:
    hf = {name: value for name, value in KIMI_LINEAR.items() if name != leave_out}
    theirs = transformers.KimiLinearConfig.from_dict(copy.deepcopy(hf))
    c = MODELS["KimiLinearForCausalLM"].config(hf)
    fields = {"D": "hidden_size", "F": "intermediate_size", "V": "vocab_size", "N": "num_local_experts",
              "H": "num_attention_heads", "A": "num_experts_per_tok", "F_expert": "moe_intermediate_size",
              "routed_scale": "routed_scaling_factor", "groups": "n_group", "kept_groups": "topk_group",
              "eps": "rms_norm_eps", "tied": "tie_word_embeddings", "max_len": "max_position_embeddings",
              "renormalize": "norm_topk_prob", "H_delta": "linear_num_heads", "E_delta": "linear_head_dim",
              "taps": "linear_conv_kernel_dim"}  # fmt: skip
    assert {n: getattr(c, n) for n in fields} == {n: getattr(theirs, field) for n, field in fields.items()}
    assert c.F_shared == theirs.n_shared_experts * theirs.moe_intermediate_size
    sizes = (c.mla.L, c.mla.N, c.mla.R, c.mla.V, c.mla.Q, c.mla.rotary)
    assert sizes == (theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim, 0, False)
    kinds = zip(theirs.layer_types, theirs.mlp_layer_types, strict=True)
    ends = {"dense": "", "sparse": "_sparse"}
    assert list(c.layer_types) == [kind.removesuffix("_attention") + ends[end] for kind, end in kinds]
    assert key_fields(c)["D"] == c.D


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False, which is not supported"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is True"),
        ({"moe_router_activation_func": "softmax"}, "scoring_func is 'softmax'"),
        (
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2]}},
            "each of 1 to num_hidden_layers = 27",
        ),
        ({"linear_attn_config": {"full_attn_layers": [1]}}, "kda_layers is None"),
        ({"linear_attn_config": {**KIMI_LINEAR["linear_attn_config"], "gate_lower_bound": -5.0}}, "gate_lower_bound"),
        ({"linear_attn_config": {**KIMI_LINEAR["linear_attn_config"], "num_heads": 0}}, "num_heads is 0"),
    ],
)
def test_kimi_linear_files_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODELS["KimiLinearForCausalLM"].config(KIMI_LINEAR | given)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip
GPT_OSS = LLAMA | {"architectures": ["GptOssForCausalLM"], "num_attention_heads": 16, "num_local_experts": 4}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8,
}  # fmt: skip
GEMMA = LLAMA | {"architectures": ["Gemma3ForCausalLM"]}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32,
}  # fmt: skip


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": {}, "Phi3": {}, "Granite": {}, "Mixtral": _LOCAL,
    "Gemma2": {"query_pre_attn_scalar": 8}, "Gemma3Text": {}, "GraniteMoe": _LOCAL, "Phimoe": _LOCAL,
    "GptOss": _LOCAL, "Qwen2Moe": _EXPERTS | {"shared_expert_intermediate_size": 32}, "Qwen3Moe": _EXPERTS,
    "Olmoe": _EXPERTS, "Qwen3Next": _EXPERTS, "Qwen3_5Text": {}, "Qwen3_5MoeText": _EXPERTS, "OlmoHybrid": {},
    "Glm4Moe": _ROUTED, "Dots1": _ROUTED,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_files_leave_out(family: str) -> None:
    """Every field that may be missing has transformers' value then."""
    name = f"{family.removesuffix('Text')}ForCausalLM"
    whole = {**LLAMA, **FAMILIES[family], "architectures": [name], "num_attention_heads": 8, "head_dim": 8,
             "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "sliding_window": 16, "rope_theta": 5e4,
             "tie_word_embeddings": True}  # fmt: skip
    compared = 0
    for field in [*whole][1:]:
        given = {n: v for n, v in whole.items() if n != field}
        try:
            c = MODELS[name].config(given)
        except ConfigError:
            continue  # it is needed
        compared += 1
        theirs = getattr(transformers, f"{family}Config").from_dict(dict(given))
        E = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        K, window = theirs.num_key_value_heads or theirs.num_attention_heads, getattr(theirs, "sliding_window", 0) or 0
        assert (c.E, c.K, c.eps, c.tied) == (E, K, theirs.rms_norm_eps, theirs.tie_word_embeddings), field
        types = MODELS[name].graphs[0].layer_types(c)
        assert c.window == window or not any("sliding" in kind for kind in types), field
        rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        if rope["rope_type"] != "yarn":
            assert c.max_len == theirs.max_position_embeddings, field
            part = rope.get("partial_rotary_factor", 1.0)
            _check_row(c.rope.inv_freq, _default(rope["rope_theta"], int(E * part)))
    assert compared >= 6


def test_old_and_new_rope_formats_agree() -> None:
    numbers = {"factor": 2.0, "original_max_position_embeddings": 256}
    new = Rope.from_hf(LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **numbers}}, 16)
    old = Rope.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **numbers}}, 16)
    assert new == old
    assert new != Rope.from_hf(LLAMA | {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **numbers}}, 16)

    linear = {"rope_type": "linear", "factor": 8.0}
    nested = {"full_attention": linear | {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    read = MODELS["Gemma3ForCausalLM"].config
    assert read(GEMMA | {"rope_scaling": linear, "rope_theta": 1e6}) == read(GEMMA | {"rope_parameters": nested})


@pytest.mark.parametrize(
    "given",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 0.5}, {"rope_type": "yarn", "factor": 0.5},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.3}, {"rope_type": "proportional"},
    ],
)  # fmt: skip
def test_rotary_settings_that_transformers_only_warns_about(given: dict[str, Any]) -> None:
    settings = {"rope_theta": 1e4, "original_max_position_embeddings": 64, **given}
    hf = LLAMA | {"rope_parameters": settings if given["rope_type"] != "linear" else {"rope_theta": 1e4, **given}}
    theirs = transformers.LlamaConfig.from_dict(dict(hf))
    expected, scale = ROPE_INIT_FUNCTIONS[given["rope_type"]](theirs, "cpu")
    rope = MODELS["LlamaForCausalLM"].config(hf).rope
    _check_row(rope.inv_freq, expected)
    assert rope.scale == pytest.approx(scale)


@pytest.mark.parametrize("where", ["above", "inside"])
def test_a_part_of_heads_that_are_rotated_whole(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers, where the frequencies of Llama do not know of it."""
    part: dict[str, Any] = {"partial_rotary_factor": 0.5}
    hf = LLAMA | (part if where == "above" else {"rope_parameters": part | {"rope_theta": 1e4}})
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(dict(hf)))
    _check_row(MODELS["LlamaForCausalLM"].config(hf).rope.inv_freq, theirs.inv_freq)
    assert "partial_rotary_factor is 0.5: without effect, this architecture rotates heads whole" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ({"hidden_size": None}, ("hidden_size", "None", "set it")),
        ({"hidden_size": 66}, ("hidden_size 66", "num_attention_heads 4", "set head_dim")),
        ({"rope_scaling": {"type": "spiral"}}, ("rope_type", "'spiral'", "use one of")),
        ({"rope_scaling": {"type": "linear"}}, ("factor", "None", "set it")),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ("short_factor", "1 numbers", "8 pairs")),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ("partial_rotary_factor", "0.5", "'linear'", "use a checkpoint"),
        ),
        (
            GEMMA
            | {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2, "partial_rotary_factor": 0.5}}},
            ("partial_rotary_factor", "0.5", "'yarn'"),
        ),
        (
            QWEN2 | {"layer_types": ["chunked_attention", "full_attention"]},
            ("layer_types", "'chunked_attention'", "full_attention"),
        ),
        (GEMMA | {"use_bidirectional_attention": True}, ("use_bidirectional_attention", "True", "False")),
        (GEMMA | {"hidden_activation": "relu"}, ("hidden_activation", "'relu'", "gelu")),
        (
            {"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True},
            ("scale_attn_by_inverse_layer_idx", "True", "False"),
        ),
        (GPT_OSS | {"swiglu_alpha": 1.5}, ("swiglu_alpha", "1.5", "1.702")),
        (GPT_OSS | {"num_experts_per_tok": 5}, ("num_experts_per_tok", "5", "4 experts")),
        (DEEPSEEK | {"moe_layer_freq": 2}, ("moe_layer_freq", "2", "with 1")),
        (DEEPSEEK | {"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "'sigmoid'")),
        (DEEPSEEK | {"topk_method": "greedy"}, ("topk_method", "'greedy'", "'noaux_tc'")),
        (DEEPSEEK | {"n_group": 3}, ("n_group is 3", "8 experts", "two and more")),
        (DEEPSEEK | {"topk_group": 5}, ("topk_group", "5", "from 1 to 4")),
        (DEEPSEEK | {"num_experts_per_tok": 5}, ("num_experts_per_tok", "5", "4 experts")),
        (DEEPSEEK | {"mlp_layer_types": ["dense"]}, ("mlp_layer_types", "1 entries", "num_hidden_layers = 2")),
        (DEEPSEEK | {"qk_rope_head_dim": 7}, ("7", "no pairs")),
        (DEEPSEEK | {"kv_lora_rank": 0}, ("kv_lora_rank", "0")),
        (
            DEEPSEEK | {"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True},
            ("norm_topk_prob", "True", "False"),
        ),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 65, "n_head": 4}, ("n_embd", "65", "n_head")),
        ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 32}, ("word_embed_proj_dim", "32", "64")),
        ({"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False}, ("do_layer_norm_before", "True")),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    hf = LLAMA | changes
    with pytest.raises(ConfigError) as error:
        MODELS[hf["architectures"][0]].config(hf)
    for word in words:
        assert word in str(error.value)


def test_what_gpt_oss_files_leave_out() -> None:
    """As in transformers: YaRN to 131,072 positions, a window of 128 in every other layer, from the first on."""
    given = {n: v for n, v in GPT_OSS.items() if n != "max_position_embeddings"}
    c, theirs = MODELS["GptOssForCausalLM"].config(given), transformers.GptOssConfig()
    assert (c.layer_types, c.window, c.E, c.K) == (("sliding", "full"), 128, theirs.head_dim, 8)
    assert (c.A, c.limit, c.eps, c.o_bias) == (4, 7.0, 1e-5, True)
    _check_row(c.rope.inv_freq, ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")[0])
