"""Checkpoints of random weights, saved by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from graphllm.embedded import MODEL_DIR


def random_checkpoint(folder: Path, kind: str, seed: int, sizes: Mapping[str, Any]) -> Path:
    """A language model of transformers' family ``kind``, such as "Llama", saved into ``folder``, which is returned.
    sizes: fields of its config."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def small_qwen3(kind: Any, folder: Path, **sizes: Any) -> Any:
    """A model of a class of Qwen3 with random weights, saved into ``folder`` with the embedded model's tokenizer.
    sizes: fields of its config that replace the ones here."""
    torch.manual_seed(7)
    config = {
        "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    model = kind(transformers.Qwen3Config(**config | sizes)).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL_DIR / name).read_bytes())
    return model
