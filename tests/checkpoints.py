"""Checkpoints of random weights, saved by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def random_checkpoint(folder: Path, kind: str, seed: int, sizes: Mapping[str, Any]) -> Path:
    """A language model of transformers' family ``kind``, such as "Llama", saved into ``folder``, which is returned.
    sizes: fields of its config."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder
