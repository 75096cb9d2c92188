"""What the tokens of a model say, as bytes: the vocabulary for backends that read no tokenizer.json themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.source import clean

if TYPE_CHECKING:
    import llguidance


@dataclass(frozen=True)
class Vocabulary:
    """texts: of each token of the model; empty for one that is none: special, a stop token, or padding. text_row,
    stop_row: the bits of those that are text, and of stop tokens."""

    texts: tuple[bytes, ...]
    stop_ids: frozenset[int]
    text_row: NDArray[np.int32]
    stop_row: NDArray[np.int32]


def read_tokenizer(folder: Path) -> llguidance.LLTokenizer:
    """tokenizer.json in llguidance's form; about a second for large ones. Raises ConfigError."""
    import llguidance

    file = folder / "tokenizer.json"
    try:
        return llguidance.LLTokenizer(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"structured_outputs: {file} is of no use for it ({clean(str(e))}); leave it out") from e


def read_vocabulary(folder: Path, vocab: int, stop_ids: frozenset[int]) -> Vocabulary:
    """Of the tokenizer in a folder. vocab: of the model, which may be larger or smaller. Raises ConfigError."""
    tokenizer = read_tokenizer(folder)
    texts = [b""] * vocab
    for token in range(min(vocab, tokenizer.vocab_size)):
        if token not in stop_ids and not tokenizer.is_special_token(token):
            texts[token] = tokenizer.decode_bytes([token])
    spoken = (token for token, text in enumerate(texts) if text)
    return Vocabulary(tuple(texts), stop_ids, bits(spoken, vocab), bits(stop_ids, vocab))


def bits(tokens: Iterable[int], vocab: int) -> NDArray[np.int32]:
    """A row of a mask with these tokens."""
    flags = np.zeros((vocab + 31) // 32 * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
