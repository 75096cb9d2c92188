"""A checkpoint folder as a user names it, opened and checked as far as its headers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError
from graphllm.config.fields import is_folder, read_json
from graphllm.weights.checkpoint import DRAFT, Checkpoint, WeightError, draft_name, fingerprint, has_weights


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, opened: its config.json and the headers of its tensors. absent: why there are none, where
    they were asked for."""

    folder: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    absent: WeightError | None = None

    @property
    def tensors(self) -> str:
        """Digest of the tensor names, shapes and dtypes. Raises WeightError when there are none."""
        if self.absent is not None:
            raise self.absent
        return fingerprint(self.checkpoint) if self.checkpoint else "random weights"


def open_source(folder: str | Path | None, load_format: str = "auto", draft: str | Path | None = None) -> Source:
    """Read a checkpoint folder, None for the embedded model's; load_format "dummy": only its config.json, weights will
    be random numbers. draft: the folder of a draft model, which joins it: its config.json as the field "draft", its
    tensors with "draft:" before their names.

    Without tensors the folder may still do, for an artifact that holds its weights. Raises ConfigError naming what else
    is missing or unreadable.
    """
    if draft is not None:
        return _joined(open_source(folder, load_format), open_source(draft, load_format))
    if folder is None:
        from graphllm.embedded import MODEL_DIR

        folder = MODEL_DIR
    folder = Path(folder)
    if not is_folder(folder):
        raise ConfigError(
            f"model: {folder!s:.200} is not a folder; give the folder of a Hugging Face checkpoint (config.json, "
            "safetensors)"
        )
    config = read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"model: {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if DRAFT in config:
        raise ConfigError(f"{folder / 'config.json'}: {DRAFT} is {config[DRAFT]!r:.80}; give it by --speculative-model")
    try:
        return Source(folder, config, None if load_format == "dummy" else Checkpoint.open(folder))
    except WeightError as absent:
        if has_weights(folder):
            raise
        return Source(folder, config, None, absent)


def _joined(source: Source, draft: Source) -> Source:
    config, absent = {**source.config, DRAFT: draft.config}, source.absent or draft.absent
    if source.checkpoint is None or draft.checkpoint is None:
        return Source(source.folder, config, None, absent)
    named = {draft_name(name): tensor for name, tensor in draft.checkpoint.tensors.items()}
    return Source(source.folder, config, Checkpoint(source.folder, {**source.checkpoint.tensors, **named}), absent)
