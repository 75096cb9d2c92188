"""The checkpoint that all systems run: a real model's shape with random bf16 weights and made-up words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.models import SHAPES

_DEVIATION = 0.02
_MERGED = ("\u0120w",)


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of a shape; ``layers``: fewer than it has, to try things out."""
    config = {**SHAPES[shape], "bos_token_id": 0, "eos_token_id": 0}
    return config if layers is None else {**config, "num_hidden_layers": layers}


def tensors_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a checkpoint with tied embeddings: of Qwen2 or Qwen3-MoE, with heads that are
    together as wide as the model, or of others, as transformers has it."""
    if is_hybrid(config) or is_latent(config):
        yield from _of_transformers(config)
        return
    hidden, heads, experts = config["hidden_size"], config["num_attention_heads"], config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    kv = hidden // heads * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, hidden)
            if not experts:
                yield f"{at}self_attn.{name}_proj.bias", (rows,)
            elif name != "v":
                yield f"{at}self_attn.{name}_norm.weight", (hidden // heads,)
        yield at + "self_attn.o_proj.weight", (hidden, hidden)
        yield at + "post_attention_layernorm.weight", (hidden,)
        if experts:
            yield at + "mlp.gate.weight", (experts, hidden)
        for mlp in [f"{at}mlp.experts.{n}." for n in range(experts)] or [at + "mlp."]:
            for name in ("gate", "up"):
                yield f"{mlp}{name}_proj.weight", (inner, hidden)
            yield mlp + "down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def is_hybrid(config: dict[str, Any]) -> bool:
    """Whether some layers are recurrent."""
    return "mamba_n_heads" in config


def is_latent(config: dict[str, Any]) -> bool:
    """Whether attention is over latents."""
    return "kv_lora_rank" in config


def _of_transformers(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape)


def words(config: dict[str, Any]) -> list[str]:
    """The vocabulary of a byte-level BPE: the bytes as it writes them, one merged token (some readers of BPE need
    one), and a made-up word for each other."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return [*letters, *_MERGED, *(f"\u0120w{i}" for i in range(len(letters) + len(_MERGED), config["vocab_size"]))]


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and tokenizer.json, unless they are there."""
    if (folder / "tokenizer.json").exists():
        return
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if "norm" in name or name.endswith(".D")
        else torch.empty(shape).normal_(0, _DEVIATION).bfloat16()
        for name, shape in tensors_of(config)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words(config))}, merges=[(m[0], m[1]) for m in _MERGED])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer.save(str(folder / "tokenizer.json"))  # last: the folder is whole when it is there
