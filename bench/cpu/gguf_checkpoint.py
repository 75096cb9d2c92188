"""A Qwen2 checkpoint as a GGUF file: the same numbers under llama.cpp's names, weights in bf16, the rest in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def gguf_name(name: str, layers: int) -> str:
    """llama.cpp's name of a checkpoint's tensor. Raises KeyError when it has none."""
    import gguf

    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, layers)
    found = known.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(name)
    return str(found)


def write_gguf(checkpoint: Path, file: Path, config: dict[str, Any], words: Sequence[str]) -> None:
    """Write it. words: the vocabulary, a byte-level BPE."""
    import gguf
    import torch
    from safetensors import safe_open

    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN2])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["a b"])  # llama.cpp wants a list; prompts are token ids
    writer.add_eos_token_id(config["eos_token_id"])
    with safe_open(checkpoint / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - no mapping
            tensor = tensors.get_tensor(name)
            as_is = tensor.ndim > 1
            data = tensor.view(torch.uint8).numpy() if as_is else tensor.float().numpy()
            kind = gguf.GGMLQuantizationType.BF16 if as_is else None
            writer.add_tensor(gguf_name(name, config["num_hidden_layers"]), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)
