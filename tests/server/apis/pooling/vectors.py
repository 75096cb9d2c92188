"""What transformers makes of the texts of these tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

TEXTS = ["A cat sleeps on the sofa.", "hello", "The sun is a star, and it is far away from here."]


@cache
def read(folder: Path, kind: Any) -> tuple[Any, Any]:
    """Tokenizer and model."""
    return AutoTokenizer.from_pretrained(folder), kind.from_pretrained(folder, dtype=torch.float32).eval()


def embedding_of(folder: Path, text: str | list[int], dimensions: int | None = None) -> np.ndarray:
    """Of the last token, of length 1."""
    tokenizer, model = read(folder, AutoModel)
    ids = tokenizer(text).input_ids if isinstance(text, str) else text
    with torch.no_grad():
        state = model(torch.tensor([ids])).last_hidden_state[0, -1][:dimensions]
    return torch.nn.functional.normalize(state, dim=0).numpy()


def score_of(folder: Path, first: str, second: str) -> float:
    """Of a cross-encoder."""
    tokenizer, model = read(folder, AutoModelForSequenceClassification)
    with torch.no_grad():
        logit = model(torch.tensor([tokenizer(first).input_ids + tokenizer(second).input_ids])).logits[0, 0]
    return logit.sigmoid().item()
