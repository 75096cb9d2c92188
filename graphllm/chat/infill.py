"""Fill-in-the-middle: a completion between a prompt and a suffix, of models that have marks for it."""

from __future__ import annotations

from typing import NamedTuple

from graphllm.config import ConfigError
from graphllm.engine.requests.text import Tokenizer


class Marks(NamedTuple):
    """The marks before the prefix, the suffix, and the middle that the model fills."""

    before: str
    suffix: str
    gap: str


_KNOWN = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek)
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)  # fmt: skip


def infilled(prompt: object, suffix: str, tokenizer: Tokenizer) -> str:
    """The prompt for what comes between. Raises ConfigError for a model without such marks, and for token ids."""
    marks = next((m for m in _KNOWN if all(tokenizer.token_id(mark) is not None for mark in m)), None)
    if marks is None:
        raise ConfigError(
            f"suffix is {suffix!r:.80}: the model has no tokens for filling a gap; leave it out, or serve a model for "
            "code that has them"
        )
    if not isinstance(prompt, str):
        raise ConfigError(f"suffix is {suffix!r:.80}: token ids have no place for it; give the prompt as text")
    return f"{marks.before}{prompt}{marks.suffix}{suffix}{marks.gap}"
