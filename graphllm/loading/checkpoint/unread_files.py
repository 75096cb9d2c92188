"""Warnings of fields without effect in the JSON files next to config.json: of the tokenizer, of generation, of
sentence-transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from graphllm.config.fields import Fields
from graphllm.engine.requests.text import Tokenizer
from graphllm.loading.checkpoint.sentence_transformers import SETTINGS, SentenceFiles
from graphllm.weights.checkpoint.inert_fields import GENERATION, SENTENCES, TOKENIZER, Reasons, unknown_fields

_log = logging.getLogger(__name__)


def warn_unread(generation: Fields, sentences: SentenceFiles, tokenizer: Tokenizer | None, tokenizing: Fields) -> None:
    """Warn of them. generation: generation_config.json. tokenizing: tokenizer_config.json, of no use without a
    tokenizer."""
    _warn("generation_config.json", {n: v for n, v in generation.items() if not _neutral(v)}, GENERATION)
    _warn(SETTINGS, sentences.settings, SENTENCES)
    for name, fields in sentences.texts.items():
        _warn(name, fields, SENTENCES)
    for path, fields in sentences.configs.items():
        if path.endswith("_Pooling"):
            _warn("config.json", fields, SENTENCES)
    if tokenizer is not None:
        for line in _contradicted(tokenizer, tokenizing):
            _log.warning("tokenizer_config.json: %s", line)
        _warn("tokenizer_config.json", tokenizing, TOKENIZER)
    similarity = sentences.settings.get("similarity_fn_name")
    if similarity not in (None, "cosine"):
        _log.warning("similarity_fn_name is %.80r: scores of two vectors are their cosine here", similarity)


def _warn(name: str, fields: Fields, inert: Reasons) -> None:
    if unread := unknown_fields(fields, inert):
        _log.warning("%s: %s: not read, and without effect here", name, ", ".join(unread))


def _neutral(value: Any) -> bool:
    """Whether a setting of generation is off."""
    return isinstance(value, int | float) and value in (0, 1)


def _contradicted(tokenizer: Tokenizer, tokenizing: Fields) -> Iterator[str]:
    """tokenizer.json decides what comes before and after a text; transformers 5 reads these switches only without
    one."""
    around = tokenizer.encode("a")
    ends = {"bos": (around[:1], tokenizer.bos_id, "before"), "eos": (around[-1:], tokenizer.eos_id, "after")}
    for name, (found, number, where) in ends.items():
        switch = tokenizing.get(f"add_{name}_token")
        if isinstance(switch, bool) and number is not None and switch != (found == [number]):
            does = "none" if switch else "one"
            yield f"add_{name}_token is {switch}, but tokenizer.json puts {does} {where} a text, which is what happens"
