"""How tests of vectors open a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphllm import LLM


def open_llm(folder: Path, **options: Any) -> LLM:
    """The model in a folder, in few tokens a step. options: settings besides, or in place of these."""
    given = {
        "skip_tokenizer_init": True, "backend": "eager", "target": "cpu", "dtype": "float32", "max_num_seqs": 4,
        "max_model_len": 128, "max_num_batched_tokens": 16,
    } | options  # fmt: skip
    return LLM(folder, **given)
