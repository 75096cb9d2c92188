"""A GGUF file as a checkpoint folder: links to the file, and the config.json that its metadata stands for. The
tokenizer is a folder of its own, made when it is asked for. Both stay in the cache, named after the file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

from graphllm.config import ConfigError
from graphllm.config.fields import is_folder
from graphllm.loading.checkpoint.made_once import file_facts, made_once
from graphllm.weights.checkpoint.checkpoint import gguf_in, weight_files
from graphllm.weights.checkpoint.gguf.config import config_of
from graphllm.weights.checkpoint.gguf.header import files_of, read_gguf

_TOKENIZER = "graphllm.loading.checkpoint.gguf_tokenizer"  # imports the library of tokenizers


def gguf_named(given: Path) -> Path | None:
    """The GGUF file that a user's path means: itself, or the only one of a folder without other weights. Raises
    ConfigError where there are several, and for a file that is not there."""
    if given.suffix == ".gguf" and not is_folder(given):
        if not given.is_file():
            raise ConfigError(f"model: {given!s:.200} is not there; give the path of a GGUF file")
        return given
    if not is_folder(given) or (given / "config.json").exists() or weight_files(given):
        return None
    return gguf_in(given)


def gguf_folder(file: Path) -> Path:
    """The checkpoint folder. Raises ConfigError for a file that cannot be read."""

    def write(folder: Path) -> None:
        found = read_gguf(file)
        (folder / "config.json").write_text(json.dumps(config_of(found), indent=2))
        for part in found.files:
            (folder / part.name).symlink_to(part.resolve())

    return _kept("gguf", file, write)


def gguf_tokenizer_folder(folder: Path) -> Path | None:
    """The folder with the tokenizer.json of a folder's GGUF file; None where there is no such file. Raises ConfigError
    for several, and for a tokenizer that cannot be read."""
    file = gguf_in(folder)
    return None if file is None else _kept(
        "gguf-tokenizer", file,
        lambda made: importlib.import_module(_TOKENIZER).write_tokenizer(read_gguf(file).metadata, made, file),
    )  # fmt: skip


def _kept(what: str, file: Path, write: Callable[[Path], None]) -> Path:
    return made_once(what, [_VERSION, file_facts(files_of(file))], lambda building, _: write(building))


_VERSION = 3  # of what is written; another one leaves what older ones wrote
