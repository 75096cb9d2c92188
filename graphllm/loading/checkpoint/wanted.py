"""Which files of a repository on the hub are needed: of a model, a draft head, a tokenizer, a config."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphllm.weights.checkpoint.checkpoint import pick_weights, weight_files

_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configs, tokenizer, chat template
_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
_DENSE = "[0-9]*_Dense/"  # of sentence-transformers: a dense layer that follows pooling


class Wanted(ABC):
    """What is needed of a repository."""

    @abstractmethod
    def complete(self, folder: Path) -> bool:
        """Whether a folder has it all."""

    def of(self, names: Sequence[str]) -> list[str]:
        """The needed ones of a repository's files. Raises ConfigError where it has nothing of use."""
        return [
            name
            for name in names
            if fnmatch.fnmatchcase(name, "additional_chat_templates/*.jinja")
            or fnmatch.fnmatchcase(name, "[0-9]*_*/config.json")  # sentence-transformers' modules
            or ("/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEXTS))
        ]


@dataclass(frozen=True)
class OneOf(Wanted):
    """One of some files, with all small ones. patterns: of their names."""

    patterns: tuple[str, ...]

    def complete(self, folder: Path) -> bool:
        """One of them is there."""
        return any(p.exists() for pattern in self.patterns for p in folder.glob(pattern))


CONFIG, TOKENIZER, GENERATION_CONFIG = OneOf(("config.json",)), OneOf(_TOKENIZERS), OneOf(("generation_config.json",))


@dataclass(frozen=True)
class WholeModel(Wanted):
    """The config, tokenizer and weights of a model. load_format: as `weight_files` has it, or dummy: no weights."""

    load_format: str

    def complete(self, folder: Path) -> bool:
        """All of them are there."""
        if not CONFIG.complete(folder) or not TOKENIZER.complete(folder):
            return False
        dense = (file.parent for file in folder.glob(_DENSE + "config.json"))
        return self.load_format == "dummy" or (
            _has_weights(folder, self.load_format) and all(weight_files(layer, self.load_format) for layer in dense)
        )

    def of(self, names: Sequence[str]) -> list[str]:
        """Weights in the folders of dense layers, too."""
        folders = sorted(
            {n.rpartition("/")[0] for n in names if fnmatch.fnmatchcase(n, _DENSE + "*") and n.count("/") == 1}
        )
        dense = [
            f"{folder}/{name}"
            for folder in folders
            for name in pick_weights(
                [n.rpartition("/")[2] for n in names if n.startswith(f"{folder}/")], self.load_format
            )
        ]
        return super().of(names) + pick_weights(_outside_folders(names), self.load_format) + dense


class DraftHead(Wanted):
    """The config and weights of a draft head; its tokenizer is the model's."""

    def complete(self, folder: Path) -> bool:
        """Both are there."""
        return CONFIG.complete(folder) and _has_weights(folder, "auto")

    def of(self, names: Sequence[str]) -> list[str]:
        """No weights in folders."""
        return super().of(names) + pick_weights(_outside_folders(names), "auto")


def _has_weights(folder: Path, load_format: str) -> bool:
    files = weight_files(folder, load_format)
    return bool(files) and all((folder / file).is_file() for file in files)


def _outside_folders(names: Sequence[str]) -> list[str]:
    return [name for name in names if "/" not in name]
