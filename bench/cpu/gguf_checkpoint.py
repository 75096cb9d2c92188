"""A Qwen2, Qwen3-MoE, Granite hybrid or dense DeepSeek-V2 checkpoint as a GGUF file: the same numbers under llama.cpp's names, weights in
bf16, the rest in float32. The matrices of a layer's experts are stacked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.cpu.checkpoint import is_hybrid, is_latent, words
from bench.cpu.peer import Workload

GGUF_BITS = {"bf16": 16, "Q8_0": 8, "Q4_0": 4, "Q4_K_M": 4}
"""The files that are compared, by llama.cpp's names, and the bits of a weight. Some matrices have more: rows that are
no multiple of 256 cannot be Q4_K, and llama.cpp keeps some in Q6_K, Q5_0 or Q8_0."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def gguf_file(model: Workload, kind: str) -> Path:
    """Where the file of that kind is, or is to be."""
    return model.work / f"{kind}.gguf"


def write_quantized(model: Workload, kind: str) -> None:
    """Write that file, unless it is there: llama.cpp rounds the numbers."""
    whole, file = gguf_file(model, "bf16"), gguf_file(model, kind)
    if not whole.exists():
        write_gguf(model.checkpoint, whole, model.config, words(model.config))
    if file.exists():
        return
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    part = file.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(whole).encode(), str(part).encode(), params):
        raise RuntimeError(f"llama.cpp could not quantize {whole} to {kind}")
    part.rename(file)


def gguf_name(name: str, config: dict[str, Any]) -> str:
    """llama.cpp's name of a checkpoint's tensor, of a stack for one of an expert. Raises KeyError when it has none."""
    import gguf

    known = gguf.get_tensor_name_map(_architecture(config), config["num_hidden_layers"])
    found = known.get_name(_EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(name)
    return str(found)


def write_gguf(checkpoint: Path, file: Path, config: dict[str, Any], words: Sequence[str]) -> None:
    """Write it. words: the vocabulary, a byte-level BPE."""
    import gguf
    import torch
    from safetensors import safe_open

    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[_architecture(config)])
    add_sizes(writer, config)
    if is_hybrid(config):
        _add_hybrid(writer, config)
    elif is_latent(config):
        _add_latent(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["\u0120 w"])  # the one merged token of `words`
    writer.add_eos_token_id(config["eos_token_id"])
    with safe_open(checkpoint / "model.safetensors", framework="pt") as tensors:
        for name, sources in _stacks(tensors.keys()).items():
            parts = [tensors.get_tensor(source) for source in sources]
            tensor = torch.stack(parts) if len(parts) > 1 else parts[0]
            for called, part_of_it in _renamed(name, tensor, config):
                as_is = part_of_it.dtype == torch.bfloat16
                data = part_of_it.view(torch.uint8).numpy() if as_is else part_of_it.numpy()
                writer.add_tensor(called, data, raw_dtype=gguf.GGMLQuantizationType.BF16 if as_is else None)
    finish(writer)
    part.rename(file)


def _renamed(name: str, tensor: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What llama.cpp has in a tensor's place: matrices in bf16, vectors, routers and what scans read in float32."""
    if ".mamba." in name:
        layer, leaf = name.split(".")[2], name.partition(".mamba.")[2]
        if leaf == "A_log":
            yield f"blk.{layer}.ssm_a", -tensor.float().exp()[:, None]
        elif leaf == "D":
            yield f"blk.{layer}.ssm_d", tensor.float()[:, None]
        elif leaf == "dt_bias":
            yield f"blk.{layer}.ssm_dt.bias", tensor.float()
        elif leaf == "conv1d.weight":
            yield f"blk.{layer}.ssm_conv1d.weight", tensor.float().squeeze(1)
        elif leaf == "norm.weight":
            yield f"blk.{layer}.ssm_norm.weight", tensor.float().reshape(config["mamba_n_groups"], -1)
        else:
            yield gguf_name(name, config), tensor if tensor.ndim > 1 else tensor.float()
    elif ".shared_mlp." in name:
        layer = name.split(".")[2]
        if name.endswith("input_linear.weight"):
            for called, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"blk.{layer}.ffn_{called}.weight", part
        else:
            yield f"blk.{layer}.ffn_down.weight", tensor
    elif name.endswith(".kv_b_proj.weight"):
        heads, keys = config["num_attention_heads"], config["qk_nope_head_dim"]
        up = tensor.unflatten(0, (heads, -1))
        yield gguf_name(name.replace("kv_b_proj", "k_b_proj"), config), up[:, :keys].transpose(1, 2).contiguous()
        yield gguf_name(name.replace("kv_b_proj", "v_b_proj"), config), up[:, keys:].contiguous()
    else:
        plain = tensor.ndim > 1 and not name.endswith("mlp.gate.weight")
        yield gguf_name(name, config), tensor if plain else tensor.float()


def _add_hybrid(writer: Any, config: dict[str, Any]) -> None:
    attends = [kind == "attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] if a else 0 for a in attends])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")  # it says whether there is any
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _add_latent(writer: Any, config: dict[str, Any]) -> None:
    """Keys and values as they are cached, for one head, and as heads have them."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])  # of layers that there are none of
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])


def add_sizes(writer: Any, config: dict[str, Any]) -> None:
    """Fields that every model's file has."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])


def finish(writer: Any) -> None:
    """Write and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(config: dict[str, Any]) -> Any:
    import gguf

    if is_hybrid(config):
        return gguf.MODEL_ARCH.GRANITE_HYBRID
    if is_latent(config):
        return gguf.MODEL_ARCH.DEEPSEEK2
    return gguf.MODEL_ARCH.QWEN3MOE if "num_experts" in config else gguf.MODEL_ARCH.QWEN2


def _stacks(names: Sequence[str]) -> dict[str, list[str]]:
    """The checkpoint's tensors. Tensors of a layer's experts that belong together have one name."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        expert = _EXPERT.search(name)
        found.setdefault(_EXPERT.sub(".experts.", name), {})[int(expert[1]) if expert else 0] = name
    return {name: [parts[n] for n in sorted(parts)] for name, parts in found.items()}
