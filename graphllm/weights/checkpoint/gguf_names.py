"""What GGUF files call the settings and tensors of the model families here: config.json's fields and the names of a
Hugging Face checkpoint, of a file's metadata and table. Another architecture is an entry of `_FAMILIES`."""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graphllm.weights.checkpoint.gguf import Gguf, Tensor
from graphllm.weights.checkpoint.tensor_info import TensorInfo, WeightError


class _Family(NamedTuple):
    """interleaved: whether the rows of queries and keys are, by head. settings: fields that the file leaves out."""

    architecture: str
    interleaved: bool = False
    settings: Mapping[str, Any] = {}


# By general.architecture.
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", interleaved=True),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM"),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", settings={"norm_topk_prob": True}),
}
# config.json's fields, by the file's key after the architecture's name.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ROPE = (
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
)  # fmt: skip
# What a file may say and the families here are anyway: by the key, the only value.
_ONLY: Mapping[str, object] = {
    "attention.causal": True, "expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 1,
    "expert_shared_count": 0, "leading_dense_block_count": 0, "rope.scaling.attn_factor": 1.0,
    "tensor_data_layout": "Meta AI original pth",
}  # fmt: skip
# What changes no number: sizes that the tensors show, and what other programs do with the file.
_INERT = (
    "general.*", "split.*", "quantize.*", "imatrix.*", "*.vocab_size", "*.rope.scaling.finetuned", "GGUF.*",
    "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.add_*", "tokenizer.ggml.*_token_id",
    "tokenizer.ggml.token_type_count", "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.huggingface.json",
    "tokenizer.chat_template*",
)  # fmt: skip
# What ends a turn, where the file does not say it by a number: older ones do not.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_log = logging.getLogger(__name__)
_NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3.1 and later divide the frequencies by
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TAGS = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def config_of(file: Gguf) -> dict[str, Any]:
    """The fields of a config.json. Raises WeightError for what cannot be read."""
    name, family = _family(file)
    metadata = file.metadata
    if missing := [key for key in _NEEDED if f"{name}.{key}" not in metadata]:
        raise _bad(file, f"metadata has no {name}.{missing[0]}; convert the model again")
    found = {field: metadata[f"{name}.{key}"] for key, field in _FIELDS.items() if f"{name}.{key}" in metadata}
    if lists := [field for field, value in found.items() if isinstance(value, list)]:
        raise _bad(file, f"{lists[0]} differs between layers, which is not supported; use another model")
    if family.architecture == "LlamaForCausalLM" and found.pop("num_experts", 0):
        raise _bad(file, "a llama with experts (Mixtral), which is not read from GGUF; use its safetensors")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _bad(file, "there is no tensor token_embd.weight; give the file of a whole model")
    _check_others(file, name, found)
    return {
        "architectures": [family.architecture],
        **family.settings,
        **found,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
        "vocab_size": embedding.shape[0],
        "rope_theta": metadata.get(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, name, found),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "dtype": "float32" if embedding.kind.name == "f32" else "bfloat16",
        "quantization_config": {"quant_method": "gguf", "types": _types(file)},
    }


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text, a turn or a message."""
    numbers = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if numbers[1] is None:
        tokens = metadata.get("tokenizer.ggml.tokens") or ()
        numbers[1] = next((tokens.index(end) for end in _TURN_ENDS if end in tokens), None)
    return list(dict.fromkeys(number for number in numbers if isinstance(number, int)))


def _check_others(file: Gguf, name: str, config: Mapping[str, Any]) -> None:
    """Refuse what the families here do not compute, and warn of what is not known."""
    width = _head_dim(file, name)
    only = {**_ONLY, "rope.dimension_count": width, "attention.value_length": width}
    for key, value in only.items():
        said = file.metadata.get(f"{name}.{key}", value)
        if said != value and not (said == 0 and isinstance(value, float)):
            raise _bad(file, f"{name}.{key} is {said!r:.80}, only {value!r} is supported; use the model's safetensors")
    read = {f"{name}.{key}" for key in (*_FIELDS, *_ROPE, *only)}
    if unread := sorted(key for key in file.metadata if key not in read and not _is_inert(key)):
        _log.warning("%s: %s: not read, and without effect here", file.files[0], ", ".join(unread))


def _is_inert(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in _INERT)


def tensors_of(file: Gguf) -> dict[str, TensorInfo]:
    """Where the tensors of a checkpoint are, by their names in one. Encoded ones are bytes, one of a stack of experts
    is a stretch of the stack."""
    return {
        name: TensorInfo(tensor.file, *_stored(tensor, encoding), tensor.offset, tensor.nbytes)
        for name, (tensor, encoding) in _named(file).items()
    }


def _family(file: Gguf) -> tuple[str, _Family]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise _bad(
            file,
            f"general.architecture is {name!r:.80}; GGUF files of {', '.join(_FAMILIES)} are read: use the model's "
            "safetensors, if the README lists its family under Models",
        )
    return name, _FAMILIES[name]


def _stored(tensor: Tensor, encoding: str | None) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and shape."""
    if encoding is None:
        return _TAGS[tensor.kind.name], tensor.shape
    return "U8", (*tensor.shape[:-1], tensor.shape[-1] // tensor.kind.entries * tensor.kind.nbytes)


def _types(file: Gguf) -> dict[str, str]:
    """The encodings of modules, without "gguf_"."""
    named = _named(file).items()
    return {name.removesuffix(".weight"): encoding for name, (_, encoding) in named if encoding is not None}


def _named(file: Gguf) -> dict[str, tuple[Tensor, str | None]]:
    """The tensors, each with its encoding, None for plain numbers. Raises WeightError for one that has no place."""
    name, family = _family(file)
    found: dict[str, tuple[Tensor, str | None]] = {}
    for own, tensor in file.tensors.items():
        block = _BLOCK.fullmatch(own)
        kind = tensor.kind.name
        plain = None if kind in _TAGS else kind
        stem, _, end = own.rpartition(".")
        if block is None and stem in _WHOLE:
            found[f"{_WHOLE[stem]}.{end}"] = tensor, plain
        elif block is not None and block[2] in _EXPERTS and len(tensor.shape) == 3:
            for i in range(tensor.shape[0]):
                part = tensor._replace(shape=tensor.shape[1:])
                at = f"model.layers.{block[1]}.mlp.experts.{i}.{_EXPERTS[block[2]]}.weight"
                found[at] = part._replace(offset=tensor.offset + i * part.nbytes), plain
        elif block is not None and block[2] in _LAYER:
            at = f"model.layers.{block[1]}.{_LAYER[block[2]]}.{block[3]}"
            if not family.interleaved or block[2] not in ("attn_q", "attn_k"):
                found[at] = tensor, plain
            elif block[3] == "bias":
                raise _bad(file, f"tensor {own}: a llama with biases is not read from GGUF; use its safetensors")
            else:
                found[at] = tensor, f"{kind}-{_head_dim(file, name)}"
        elif own != _ROPE_FACTORS:
            raise _bad(file, f"tensor {own} is not one of {family.architecture}; use the model's safetensors")
    return found


def _head_dim(file: Gguf, name: str) -> int:
    width, count = (file.metadata.get(f"{name}.{key}", 0) for key in ("embedding_length", "attention.head_count"))
    return int(file.metadata.get(f"{name}.attention.key_length") or width // max(1, count))


def _rope_scaling(file: Gguf, name: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the rotary embedding reaches beyond its first context."""
    if _ROPE_FACTORS in file.tensors:
        return _llama3(file, file.metadata.get(f"{name}.rope.freq_base", 10000.0))
    kind = file.metadata.get(f"{name}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{name}.rope.scaling.factor")
    if kind == "none" or factor is None:
        return None
    if kind not in ("linear", "yarn"):
        raise _bad(file, f"{name}.rope.scaling.type is {kind!r:.80}; none, linear and yarn are read")
    first = file.metadata.get(f"{name}.rope.scaling.original_context_length")
    return {"rope_type": kind, "factor": factor} | ({"original_max_position_embeddings": first} if first else {})


def _llama3(file: Gguf, base: float) -> dict[str, Any]:
    """Llama 3's settings, found by their factors: the files have nothing but the factors. They were computed in
    float32, hence the tolerance."""
    import numpy as np

    tensor = file.tensors[_ROPE_FACTORS]
    stored = np.fromfile(tensor.file, "<f4", math.prod(tensor.shape), offset=tensor.offset).astype(float)
    waves = 2 * math.pi * base ** (np.arange(len(stored)) / len(stored))
    for factor in (8.0, 32.0):
        low, high, first = 1.0, 4.0, 8192
        smooth = np.clip((first / waves - low) / (high - low), 0, 1)
        if np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": first,
            }  # fmt: skip
    raise _bad(file, f"{_ROPE_FACTORS} is not of Llama 3.1, 3.2 or 3.3; use the model's safetensors")


def _bad(file: Gguf, why: str) -> WeightError:
    return WeightError(Path(file.files[0]), [why])
