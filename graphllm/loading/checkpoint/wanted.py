"""Which files of a repository on the hub are needed: of a model, a draft head, a tokenizer, a config."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from graphllm.weights.checkpoint.checkpoint import pick_weights, weight_files

_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configs, tokenizer, chat template
_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
_DENSE = "[0-9]*_Dense/"  # of sentence-transformers: a dense layer that follows pooling


class Wanted(NamedTuple):
    """What is needed of a repository.

    complete: whether a folder has it all.
    of: chooses the needed files among a repository's; raises ConfigError where it has nothing of use.
    """

    complete: Callable[[Path], bool]
    of: Callable[[Sequence[str]], Sequence[str]]


def whole_model(load_format: str) -> Wanted:
    """Its config, tokenizer and weights."""

    def complete(folder: Path) -> bool:
        files = weight_files(folder, load_format)
        weights = load_format == "dummy" or (files and all((folder / file).is_file() for file in files))
        dense = all(weight_files(file.parent, load_format) for file in folder.glob(_DENSE + "config.json"))
        whole = load_format == "dummy" or dense
        return bool(CONFIG.complete(folder) and TOKENIZER.complete(folder) and weights and whole)

    def of(names: Sequence[str]) -> list[str]:
        folders = sorted(
            {n.rpartition("/")[0] for n in names if fnmatch.fnmatchcase(n, _DENSE + "*") and n.count("/") == 1}
        )
        dense = [
            f"{folder}/{name}"
            for folder in folders
            for name in pick_weights([n.rpartition("/")[2] for n in names if n.startswith(f"{folder}/")], load_format)
        ]
        return _texts(names) + pick_weights([n for n in names if "/" not in n], load_format) + dense

    return Wanted(complete, of)


def _draft_head() -> Wanted:
    """A draft head: its config and weights; its tokenizer is the model's."""

    def complete(folder: Path) -> bool:
        files = weight_files(folder)
        return CONFIG.complete(folder) and bool(files) and all((folder / file).is_file() for file in files)

    return Wanted(complete, lambda names: _texts(names) + pick_weights([n for n in names if "/" not in n], "auto"))


def _texts(names: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        if fnmatch.fnmatchcase(name, "additional_chat_templates/*.jinja")
        or fnmatch.fnmatchcase(name, "[0-9]*_*/config.json")  # sentence-transformers' modules
        or ("/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEXTS))
    ]


def _has(*patterns: str) -> Wanted:
    """One of these files, with all small ones."""
    return Wanted(lambda folder: any(p.exists() for pattern in patterns for p in folder.glob(pattern)), _texts)


CONFIG, TOKENIZER, GENERATION_CONFIG = _has("config.json"), _has(*_TOKENIZERS), _has("generation_config.json")
DRAFT_HEAD = _draft_head()
