"""What a checkpoint is used for: to generate text, or to give vectors, which one with a language head does, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError
from graphllm.config.fields import read_json, strings

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_CONVERTED = {"embed": "Model", "classify": "ForSequenceClassification"}


def with_runner(config: Mapping[str, Any], folder: Path, runner: str, convert: str) -> dict[str, Any]:
    """The config.json of the model that the settings ``runner`` and ``convert`` make of a checkpoint.

    One with a language head gives vectors with runner "pooling", or where sentence-transformers' modules.json lies in
    its folder: by its hidden states, or with convert "classify" by a classifier's head. The tokens of
    ``classifier_from_token`` become ``classifier_token_ids``. Raises ConfigError for what cannot be.
    """
    if runner == "generate" and convert != "none" and convert != "auto":
        raise ConfigError(f"convert is {convert!r}: the model is to generate text; give runner 'pooling' with it")
    names = strings(config, "architectures")
    causal = next((end for end in _CAUSAL if names and names[0].endswith(end)), None)
    made = dict(config)
    sentences = (folder / "modules.json").is_file()
    if runner == "pooling" or (runner == "auto" and (sentences or convert in _CONVERTED)):
        if causal is not None:
            told = "classify" if convert == "auto" and "classifier_from_token" in config else convert
            made["architectures"] = [names[0].removesuffix(causal) + _CONVERTED.get(told, "Model")]
    elif runner == "generate" and names and causal is None:
        raise ConfigError(f"runner is 'generate': {names[0]} has no language head; use 'pooling'")
    if (tokens := config.get("classifier_from_token")) is not None:
        made["classifier_token_ids"] = _ids(tokens, folder)
    return made


def _ids(tokens: Any, folder: Path) -> list[int]:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f'classifier_from_token is {tokens!r:.80}: give a list of tokens, such as ["no", "yes"]')
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"classifier_from_token: {folder} has no tokenizer.json; give classifier_token_ids instead")
    content = read_json(folder / "tokenizer.json") or {}
    model = content.get("model")
    known = dict(model["vocab"]) if isinstance(model, dict) and isinstance(model.get("vocab"), dict) else {}
    known |= {t["content"]: t["id"] for t in content.get("added_tokens") or ()}
    if missing := [token for token in tokens if token not in known]:
        raise ConfigError(f"classifier_from_token: {missing[0]!r:.80} is no token of the model; give one that is")
    return [known[token] for token in tokens]
