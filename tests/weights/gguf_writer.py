"""Writes checkpoints as GGUF files, independently of what reads them: names by the package `gguf`, metadata by its
writer, and the changes of llama.cpp's converter.

The changes are those of convert_hf_to_gguf.py (github.com/ggml-org/llama.cpp, conversion/, August 2026; each below
names its class there). Files of the converter itself, which the package convert-hf-to-gguf 0.1.1 has, were compared
with those written here: the same tensors, and the same values of every key that is written here.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

Config = Mapping[str, Any]
Made = Iterator[tuple[str, Tensor]]
Change = Callable[[str, Tensor, Config], Made]

# Keys of every architecture, by the fields of config.json that they come of (TextModel.set_gguf_parameters).
_KEYS = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
}


class Written(NamedTuple):
    """How an architecture is written. kind: its name in a file. keys: further ones, or in place of those of the base:
    a field's name, or what makes the value of the config; None leaves it out. change: of tensors, in order."""

    kind: str
    keys: Mapping[str, Any] = {}
    changes: tuple[Change, ...] = ()


def write(
    folder: Path, file: Path, written: Written, kind: str = "F32", rounded: str = "F32",
    vocabulary: Callable[[Any, int], None] | None = None,
) -> None:  # fmt: skip
    """Write the checkpoint of a folder. kind: the type of matrices with fitting rows. rounded: the type whose numbers
    they have. vocabulary: writes the tokens."""
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if value is not None}
    made = gguf.GGUFWriter(file, written.kind)
    for key, value in _metadata(config, written).items():
        _add(made, f"{written.kind}.{key}", value)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == written.kind)
    names = gguf.get_tensor_name_map(architecture, 99)
    tensors: list[tuple[str, Tensor]] = list(load_file(folder / "model.safetensors").items())
    for change in (_stacked, *written.changes):
        tensors = [found for name, tensor in _whole(change, tensors) for found in change(name, tensor, config)]
    for name, tensor in tensors:
        own = names.get_name(name, try_suffixes=(".weight", ".bias")) or (name if name.startswith("rope_") else None)
        assert own is not None, f"{written.kind} has no name for {name}"
        numbers = np.ascontiguousarray(tensor.float().numpy())
        if tensor.ndim > 1 and _fits(own, tensor, rounded):
            coarse, fine = gguf.GGMLQuantizationType[rounded], gguf.GGMLQuantizationType[kind]
            stored = gguf.quantize(numbers, coarse)
            made.add_tensor(
                own, stored if kind == rounded else gguf.dequantize(stored, coarse).astype(np.float32), raw_dtype=fine
            )
        else:
            made.add_tensor(own, numbers)
    size = config["vocab_size"]
    if vocabulary is None:
        made.add_tokenizer_model("llama")
        made.add_token_list([f"<{i}>" for i in range(size)])
        made.add_token_scores([0.0] * size)
        made.add_token_types([1] * size)
    else:
        vocabulary(made, size)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def _fits(name: str, tensor: Tensor, kind: str) -> bool:
    """Norms, routers, filters and decays stay in float32 (prepare_tensors of the converter)."""
    if any(part in name for part in ("norm", "ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d", "bias")):
        return False
    return not tensor.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def _metadata(config: Config, written: Written) -> dict[str, Any]:
    found = {key: next((config[f] for f in fields if f in config), None) for key, fields in _KEYS.items()}
    found |= _rotary(config)
    for key, value in written.keys.items():
        found[key] = value(config) if callable(value) else config.get(value) if isinstance(value, str) else value
    return {key: value for key, value in found.items() if value is not None}


def _rotary(config: Config) -> dict[str, Any]:
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    full: Mapping[str, Any] = rope.get("full_attention", rope)
    sliding: Mapping[str, Any] = rope.get("sliding_attention", {})
    found = {"rope.freq_base": full.get("rope_theta"), "rope.freq_base_swa": sliding.get("rope_theta")}
    if full.get("rope_type") in ("linear", "yarn"):
        found |= {
            "rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full.get("original_max_position_embeddings"),
        }  # fmt: skip
    if "mscale_all_dim" in full:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * full["mscale_all_dim"]
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[type(value)](key, value)


def _whole(change: Change, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Experts one by one become stacks before anything else."""
    if change is not _stacked:
        return tensors
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    found = []
    for name, tensor in tensors:
        if (expert := re.search(r"\.experts\.(\d+)\.", name)) is not None:
            stacks[name.replace(expert[0], ".experts.")][int(expert[1])] = tensor
        else:
            found.append((name, tensor))
    return found + [(name, torch.stack([e[i] for i in range(len(e))])) for name, e in stacks.items()]


def _stacked(name: str, tensor: Tensor, config: Config) -> Made:
    yield name, tensor


def permuted(name: str, tensor: Tensor, config: Config) -> Made:
    """LlamaModel.permute: the halves of each head's rows by turns."""
    heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
    if re.search(r"\.[qk]_proj\.", name):
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    yield name, tensor


def norms_plus_one(name: str, tensor: Tensor, config: Config) -> Made:
    """Gemma2Model, Gemma3Model, Qwen3NextModel."""
    plus = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    yield name, tensor + 1 if plus else tensor


def mamba(name: str, tensor: Tensor, config: Config) -> Made:
    """MambaModel: decays in place of their logarithms, filters as matrices."""
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    yield name, tensor


def mamba2(name: str, tensor: Tensor, config: Config) -> Made:
    """Mamba2Model: one column for each head, one row for each group of the norm."""
    groups = config.get("n_groups") or config.get("mamba_n_groups") or 1
    if name.endswith(("A_log", ".D")):
        tensor = tensor[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        tensor = tensor.reshape(groups, -1)
    yield from mamba(_bias(name), tensor, config)


def _bias(name: str) -> str:
    return name.replace(".dt_bias", ".dt_proj.bias")


def granite(name: str, tensor: Tensor, config: Config) -> Made:
    """GraniteMoeModel: gates and ups apart."""
    at = ".".join(name.split(".")[:3])
    experts = config.get("num_local_experts")
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = tensor.chunk(2, 1)
        yield f"{at}.mlp.experts.gate_proj.weight", gate
        yield f"{at}.mlp.experts.up_proj.weight", up
    elif "shared_mlp.input_linear" in name:
        of = "mlp.shared_expert" if experts else "mlp"
        gate, up = tensor.chunk(2, 0)
        yield f"{at}.{of}.gate_proj.weight", gate
        yield f"{at}.{of}.up_proj.weight", up
    elif "shared_mlp.output_linear" in name and not experts:
        yield f"{at}.mlp.down_proj.weight", tensor
    else:
        yield name, tensor


def gpt_oss(name: str, tensor: Tensor, config: Config) -> Made:
    """GptOssModel: gates and ups apart, and matrices not transposed."""
    if name.endswith("sinks"):
        yield name + ".weight", tensor
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif name.endswith("experts.down_proj"):
        yield name + ".weight", tensor.transpose(1, 2)
    elif "gate_up_proj" in name:
        biases = name.endswith("_bias")
        stem = name.removesuffix("gate_up_proj_bias" if biases else "gate_up_proj")
        turned = tensor if biases else tensor.transpose(1, 2)
        for i, part in enumerate(("gate", "up")):
            half = turned[:, i::2]
            yield f"{stem}{part}_proj.{'bias' if biases else 'weight'}", half
    else:
        yield name, tensor


def latents(name: str, tensor: Tensor, config: Config) -> Made:
    """DeepseekV2Model: what makes keys transposed, and apart from what makes values."""
    if not name.endswith("kv_b_proj.weight"):
        yield name, tensor
        return
    by_head = tensor.unflatten(0, (config["num_attention_heads"], -1))
    keys, values = by_head.split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def transposed(name: str, tensor: Tensor, config: Config) -> Made:
    """GPT2Model."""
    yield name, tensor.T if re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name) else tensor


def falcon_h1(name: str, tensor: Tensor, config: Config) -> Made:
    """FalconH1Model: the multipliers are in the numbers."""
    gate, down = config["mlp_multipliers"]
    inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    attention = config["attention_in_multiplier"]
    factors = {
        "gate_proj": gate, "down_proj": down, "k_proj": config["key_multiplier"] * attention, "q_proj": attention,
        "v_proj": attention, "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    part = next((p for p in name.split(".") if p in factors), "")
    if part == "in_proj":
        rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(
            torch.tensor([inner, inner, states, states, config["mamba_n_heads"]])
        )
        tensor = tensor * rows.view(-1, *[1] * (tensor.ndim - 1))
    yield name, tensor * factors.get(part, 1.0)


def by_part(name: str, tensor: Tensor, config: Config) -> Made:
    """Qwen3NextModel: queries, keys, values and gates of all key heads one after the other."""
    if "in_proj_qkvz" not in name:
        yield _bias(name), tensor
        return
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    wide = values // keys * config["linear_value_head_dim"]
    parts = tensor.unflatten(0, (keys, -1)).split((*[config["linear_key_head_dim"]] * 2, wide, wide), 1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat([q, k, v])
    yield name.replace("in_proj_qkvz", "in_proj_z"), z


def by_turns(name: str, tensor: Tensor, config: Config) -> Made:
    """_LinearAttentionVReorderBase: value heads by turns of the key heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, rows = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def turned(x: Tensor, each: int) -> Tensor:
        return x.unflatten(0, (keys, values // keys, each)).transpose(0, 1).flatten(0, 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        tensor = torch.cat([tensor[:rows], turned(tensor[rows:], width)])
    elif "in_proj_z" in name:
        tensor = turned(tensor, width)
    elif re.search(r"in_proj_[ab]\.|A_log|dt_bias", name):
        tensor = turned(tensor, 1)
    elif "linear_attn.out_proj" in name:
        tensor = turned(tensor.T, width).T
    yield _bias(name), tensor


def jamba(name: str, tensor: Tensor, config: Config) -> Made:
    """JambaModel: the names of Qwen2-MoE's experts."""
    yield name.replace("feed_forward.experts", "mlp.experts"), tensor


def nemotron(name: str, tensor: Tensor, config: Config) -> Made:
    """NemotronHModel."""
    name = name.replace("mixer.gate.e_score_correction_bias", "mixer.gate.e_score_correction.bias")
    yield re.sub(r"backbone(.+)mixer\.experts", r"model\1mlp.experts", name), tensor


def correction(name: str, tensor: Tensor, config: Config) -> Made:
    """TextModel: the correction of DeepSeek's router is a bias."""
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def kimi(name: str, tensor: Tensor, config: Config) -> Made:
    """KimiLinearModel, of the names that the published checkpoint has."""
    name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name).replace("forget_gate.", "")
    if "_conv1d" in name:
        tensor = tensor.reshape(1, -1, 1, tensor.shape[-1])
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    yield _bias(name), tensor


def long_factors(name: str, tensor: Tensor, config: Config) -> Made:
    """Phi3MiniModel: the factors of LongRoPE are tensors."""
    yield name, tensor
    if name == "model.norm.weight" and "long_factor" in config["rope_parameters"]:
        for which in ("long", "short"):
            yield f"rope_factors_{which}.weight", torch.tensor(config["rope_parameters"][f"{which}_factor"])


def encoder(name: str, tensor: Tensor, config: Config) -> Made:
    """BertModel, RobertaModel: no pooler, and of positions those of tokens."""
    first = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    if "pooler." not in name:
        yield name, tensor[first:] if name.endswith("position_embeddings.weight") else tensor
