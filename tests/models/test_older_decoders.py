"""The config.json of GPT-J, CodeGen, GPT-Neo, Falcon, BLOOM and MPT: published files as transformers reads them, and
refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from graphllm.config import ConfigError
from graphllm.ir.registry import load_models

MODELS = load_models()

# What the files of well-known checkpoints say.
_GPT = {
    "activation_function": "gelu_new", "attn_pdrop": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "n_inner": None, "n_positions": 2048, "resid_pdrop": 0.0, "scale_attn_weights": True, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "use_cache": True,
}  # fmt: skip
OLDER: dict[str, tuple[type, dict[str, Any]]] = {
    "gpt-j-6b": (transformers.GPTJConfig, _GPT | {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28,
        "rotary": True, "rotary_dim": 64, "vocab_size": 50400}),
    "codegen-350m-mono": (transformers.CodeGenConfig, _GPT | {
        "architectures": ["CodeGenForCausalLM"], "bos_token_id": 1, "model_type": "codegen", "n_ctx": 2048,
        "n_embd": 1024, "n_head": 16, "n_layer": 20, "rotary_dim": 32, "torch_dtype": "float16",
        "vocab_size": 51200}),
    "gpt-neo-1.3b": (transformers.GPTNeoConfig, {
        "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0,
        "attention_layers": ["global", "local"] * 12, "attention_types": [[["global", "local"], 12]],
        "bos_token_id": 50256, "embed_dropout": 0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": None, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 16, "num_layers": 24,
        "resid_dropout": 0, "summary_first_dropout": 0.1, "tokenizer_class": "GPT2Tokenizer", "use_cache": True,
        "vocab_size": 50257, "window_size": 256}),
    "falcon-7b": (transformers.FalconConfig, {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "parallel_attn": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 65024}),
    "falcon-40b": (transformers.FalconConfig, {
        "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False, "hidden_size": 8192,
        "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
        "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
        "vocab_size": 65024}),
    "falcon-rw-1b": (transformers.FalconConfig, {
        "alibi": True, "architectures": ["FalconForCausalLM"], "bias": True, "hidden_size": 2048,
        "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": False, "new_decoder_architecture": False,
        "num_attention_heads": 32, "num_hidden_layers": 24, "parallel_attn": False, "vocab_size": 50304}),
    "bloom-7b1": (transformers.BloomConfig, {
        "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
        "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 4096, "n_inner": None, "n_layer": 30,
        "num_attention_heads": 32, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0, "use_cache": True,
        "vocab_size": 250880}),
    "mpt-30b": (transformers.MptConfig, {
        "architectures": ["MPTForCausalLM"], "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
            "qk_ln": False, "softmax_scale": None},
        "d_model": 7168, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
        "init_config": {"name": "kaiming_normal_", "verbose": 0}, "init_device": "cpu", "learned_pos_emb": True,
        "logit_scale": None, "max_seq_len": 8192, "model_type": "mpt", "n_heads": 64, "n_layers": 48, "no_bias": True,
        "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "sam-mosaic/gpt-neox-20b",
        "use_cache": False, "verbose": 0, "vocab_size": 50432}),
}  # fmt: skip
LENGTHS = {"gpt-j-6b": "n_positions", "codegen-350m-mono": "n_positions", "mpt-30b": "max_seq_len"}


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("whole", [True, False])
def test_files_mean_what_transformers_reads(name: str, whole: bool) -> None:
    """The published file, and a file that leaves everything out but which architecture it is."""
    cls, hf = OLDER[name]
    hf = hf if whole else {"architectures": hf["architectures"]}
    theirs = cls.from_dict(copy.deepcopy(hf))
    model = MODELS[hf["architectures"][0]]
    c = model.config(hf)
    fields = {"D": "hidden_size", "H": "num_attention_heads", "V": "vocab_size", "L": "num_hidden_layers",
              "tied": "tie_word_embeddings", "eps": "layer_norm_epsilon"}  # fmt: skip
    assert {n: getattr(c, n) for n in fields} == {n: getattr(theirs, field) for n, field in fields.items()}
    assert c.max_len == (2048 if "bloom" in name else getattr(theirs, LENGTHS.get(name, "max_position_embeddings")))
    inner = next((v for n in ("n_inner", "intermediate_size", "ffn_hidden_size") if (v := getattr(theirs, n, None))), 0)
    assert (inner or 4 * c.D, c.D // c.H) == (c.F, c.E)
    assert hash(c) is not None
    if isinstance(theirs, transformers.GPTNeoConfig):
        kinds = {"global": "full", "local": "sliding"}
        assert list(c.layer_types) == [kinds[kind] for kind in theirs.attention_layers]
        assert (c.window, c.scale) == (theirs.window_size, 1.0)
    if isinstance(theirs, (transformers.GPTJConfig, transformers.CodeGenConfig)):
        assert len(c.rope.inv_freq) == theirs.rotary_dim // 2
    if isinstance(theirs, transformers.FalconConfig):
        grouped, alibi = theirs.new_decoder_architecture, theirs.alibi
        assert theirs.num_kv_heads if grouped or not theirs.multi_query else c.K == 1
        assert c.norms == ("two" if grouped else "one" if theirs.parallel_attn else "in turn")
        assert (c.rope is None, len(c.slopes)) == (alibi, c.H if alibi else 0)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt-j-6b", {"rotary_dim": 63}, ("rotary_dim is 63", "an even number up to a head's 256")),
        ("gpt-j-6b", {"rotary_dim": 300}, ("rotary_dim is 300", "256 numbers")),
        ("gpt-j-6b", {"rotary_dim": None}, ("rotary_dim is None",)),
        ("gpt-j-6b", {"scale_attn_weights": False}, ("scale_attn_weights is False", "with True")),
        ("gpt-j-6b", {"n_head": 15}, ("n_embd is 4096", "n_head = 15")),
        ("codegen-350m-mono", {"n_head": 2}, ("n_head is 2", "a multiple of 4")),
        ("codegen-350m-mono", {"activation_function": "silu"}, ("activation_function is 'silu'", "'gelu_new'")),
        ("gpt-neo-1.3b", {"attention_types": [[["global", "far"], 12]]}, ("attention_types has 'far'", "local")),
        ("gpt-neo-1.3b", {"attention_types": [["global", "local"]]}, ("attention_types is [['global'", "set it to")),
        ("gpt-neo-1.3b", {"num_layers": 23}, ("attention_types has 24 entries", "= 23")),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, ("num_ln_in_parallel_attn is 2", "None or 1")),
        ("falcon-40b", {"num_kv_heads": 9}, ("num_kv_heads is 9", "a divisor of 128")),
        ("falcon-40b", {"parallel_attn": False}, ("parallel_attn is False", "with True")),
        ("falcon-40b", {"num_ln_in_parallel_attn": 3}, ("num_ln_in_parallel_attn is 3", "None or 1 or 2")),
        ("falcon-40b", {"rope_scaling": {"type": "spiral"}}, ("rope_type is 'spiral'",)),
        ("falcon-rw-1b", {"num_kv_heads": 8}, ("num_kv_heads is 8", "set it to 32")),
        ("falcon-7b", {"activation": "swish"}, ("activation is 'swish'", "'gelu'")),
        ("bloom-7b1", {"apply_residual_connection_post_layernorm": True}, ("post_layernorm is True", "with False")),
        ("bloom-7b1", {"num_attention_heads": 31}, ("hidden_size is 4096", "= 31")),
        ("mpt-30b", {"no_bias": False}, ("no_bias is False", "with True")),
        ("mpt-30b", {"logit_scale": "inv_sqrt_d_model"}, ("logit_scale is 'inv_sqrt_d_model'",)),
        ("mpt-30b", {"norm_type": "rmsnorm"}, ("norm_type is 'rmsnorm'",)),
        ("mpt-30b", {"attn_config": {"alibi": False}}, ("alibi is False", "with True")),
        ("mpt-30b", {"attn_config": {"alibi_bias_max": 4}}, ("alibi_bias_max is 4", "with 8")),
        ("mpt-30b", {"attn_config": {"attn_type": "multiquery_attention"}}, ("attn_type is 'multiquery_attention'",)),
        ("mpt-30b", {"attn_config": {"qk_ln": True}}, ("qk_ln is True",)),
        ("mpt-30b", {"attn_config": {"prefix_lm": True}}, ("prefix_lm is True",)),
    ],
)
def test_settings_that_are_refused(name: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    hf = OLDER[name][1] | changes
    with pytest.raises(ConfigError) as error:
        MODELS[hf["architectures"][0]].config(hf)
    for word in words:
        assert word in str(error.value)
