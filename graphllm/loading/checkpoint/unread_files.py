"""Warnings of what the files beside config.json say without effect: of the tokenizer, of generation, of
sentence-transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphllm.config.fields import read_json
from graphllm.engine.requests.text import Tokenizer
from graphllm.weights.checkpoint.inert_fields import GENERATION, SENTENCES, TOKENIZER, Reasons, unknown_fields

_log = logging.getLogger(__name__)


def tell_unread(tokenizer: Tokenizer | None, tokenizer_folder: Path | None, generation: Path, model: Path) -> None:
    """Warn of them. generation: the folder of generation_config.json. model: of the checkpoint."""
    generating = read_json(generation / "generation_config.json") or {}
    _tell("generation_config.json", {n: v for n, v in generating.items() if not _neutral(v)}, GENERATION)
    sentences = read_json(model / "config_sentence_transformers.json") or {}
    _tell("config_sentence_transformers.json", sentences, SENTENCES)
    for file in sorted([*model.glob("sentence_*_config.json"), *model.glob("*_Pooling/config.json")]):
        _tell(file.name, read_json(file) or {}, SENTENCES)
    if tokenizer is not None and tokenizer_folder is not None:
        told = read_json(tokenizer_folder / "tokenizer_config.json") or {}
        for line in _contradicted(tokenizer, told):
            _log.warning("tokenizer_config.json: %s", line)
        _tell("tokenizer_config.json", told, TOKENIZER)
    similarity = sentences.get("similarity_fn_name")
    if similarity not in (None, "cosine"):
        _log.warning("similarity_fn_name is %.80r: scores of two vectors are their cosine here", similarity)


def _tell(name: str, fields: Mapping[str, Any], inert: Reasons) -> None:
    if unread := unknown_fields(fields, inert):
        _log.warning("%s: %s: not read, and without effect here", name, ", ".join(unread))


def _neutral(value: Any) -> bool:
    """Whether a setting of generation is off."""
    return isinstance(value, int | float) and value in (0, 1)


def _contradicted(tokenizer: Tokenizer, told: Mapping[str, Any]) -> Iterator[str]:
    """tokenizer.json decides what stands around a text; transformers 5 reads these switches only without one."""
    around = tokenizer.encode("a")
    ends = {"bos": (around[:1], tokenizer.bos_id, "before"), "eos": (around[-1:], tokenizer.eos_id, "behind")}
    for name, (found, number, where) in ends.items():
        said = told.get(f"add_{name}_token")
        if isinstance(said, bool) and number is not None and said != (found == [number]):
            does = "none" if said else "one"
            yield f"add_{name}_token is {said}, but tokenizer.json puts {does} {where} a text, which is what happens"
