"""`ModelFiles`: what the JSON files of a checkpoint folder say. Each file is opened and checked here, once. Who needs
one of them is given the `ModelFiles`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from graphllm.config.fields import Fields, read_json
from graphllm.loading.checkpoint.sentence_transformers import SentenceFiles

# Files in which quantizers put their settings, and the quant_method of each.
_QUANTIZERS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_OLDER_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # AutoAWQ's


class Vocabulary(NamedTuple):
    """The numbers of tokens that a tokenizer.json lists.

    tokens: the vocabulary of its model.
    added: tokens that were added to it.
    """

    tokens: dict[str, int]
    added: dict[str, int]


@dataclass(frozen=True)
class ModelFiles:
    """The JSON files of a checkpoint folder.

    folder: where the files are.
    config: config.json; None where there is none.
    sentences: the files of sentence-transformers.

    The properties are files that not every command needs. Each is read when it is first asked for, and raises
    ConfigError when it is damaged.
    """

    folder: Path
    config: Fields | None
    sentences: SentenceFiles

    @staticmethod
    def read(folder: Path) -> ModelFiles:
        """Read a folder; none of the files need be there. Raises ConfigError naming the file that is damaged."""
        sentences = SentenceFiles.read(folder)
        return ModelFiles(folder, read_json(folder / "config.json"), sentences)

    @cached_property
    def quantization(self) -> Fields | None:
        """The settings that a quantizer put into a file of its own, as config.json's quantization_config has them; None
        where there is no such file."""
        named = ((method, read_json(self.folder / name)) for name, method in _QUANTIZERS.items())
        return next((_renamed(method, found) for method, found in named if found is not None), None)

    @cached_property
    def generation(self) -> Fields:
        """generation_config.json, empty where there is none."""
        return read_json(self.folder / "generation_config.json") or {}

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary of tokenizer.json; None where there is no such file."""
        content = read_json(self.folder / "tokenizer.json")
        if content is None:
            return None
        model = content.get("model")
        listed = model.get("vocab") if isinstance(model, dict) else None
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return Vocabulary(listed if isinstance(listed, dict) else {}, added)


def _renamed(method: str, found: Fields) -> Fields:
    return {"quant_method": method, **{_OLDER_NAMES.get(name, name): value for name, value in found.items()}}
