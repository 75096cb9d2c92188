"""config.json as the engine computes it: a checkpoint's own, with what its other files and the settings say. No file is
opened here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from graphllm.config import ConfigError
from graphllm.config.fields import MODEL_IMPL, Fields
from graphllm.config.pooling_config import POOLING
from graphllm.loading.checkpoint.model_files import ModelFiles
from graphllm.program.implementation import is_named
from graphllm.weights.checkpoint.checkpoint import DRAFT, Checkpoint
from graphllm.weights.checkpoint.multimodal import text_config
from graphllm.weights.checkpoint.own_head import HEAD, has_own_head

_log = logging.getLogger(__name__)

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # endings of architectures that generate text
_CONVERTED = {"embed": "Model", "classify": "ForSequenceClassification"}


def stored_config(files: ModelFiles) -> dict[str, Any]:
    """A folder's config.json. Raises ConfigError where there is none, and for a field that only graphllm gives."""
    if files.config is None:
        raise ConfigError(f"model: {files.folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if DRAFT in files.config:
        value = files.config[DRAFT]
        raise ConfigError(f"{files.folder / 'config.json'}: {DRAFT} is {value!r:.80}; give it by --speculative-model")
    return dict(files.config)


def overridden(config: dict[str, Any], overrides: Fields) -> dict[str, Any]:
    """The fields of both. The config of a model within the model is overridden field by field."""
    merged = dict(config)
    for name, value in overrides.items():
        old = config.get(name)
        inner = isinstance(old, dict) and "model_type" in old and isinstance(value, Mapping)
        merged[name] = overridden(old, value) if inner and old is not None else value
    return merged


def text_of(config: dict[str, Any], overrides: Fields) -> dict[str, Any]:
    """The config.json of a multimodal model's text model; of other models, their own. overrides: fields that are in it
    already. Raises ConfigError for architectures that are no texts."""
    text = text_config(config)
    if text is None:
        return config
    name = config["architectures"][0]
    _log.warning("config.json: %s is multimodal and runs as its text model: it reads no images", name)
    return {**text, **{n: v for n, v in overrides.items() if n != "text_config"}}


def with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json that names no architecture gets the known one that its model_type stands for."""
    kind = config.get("model_type")
    if config.get("architectures") or not isinstance(kind, str):
        return config
    from graphllm.ir.registry import load_models  # imports torch and every family

    plain = kind.removesuffix("_text").replace("_", "")
    models = load_models()
    known = [n for n in models for end in _CAUSAL if n.lower().replace("_", "") == plain + end.lower()]
    first = sorted(known, key=lambda n: models[n].architectures.index(n))[:1]  # families may have older names, too
    return {**config, "architectures": first} if known else config


def with_quantization(config: dict[str, Any], files: ModelFiles) -> dict[str, Any]:
    """A config.json with the field quantization_config, where a quantizer's own file says it."""
    if "quantization_config" in config or files.quantization is None:
        return config
    return {**config, "quantization_config": files.quantization}


def with_pooling(config: dict[str, Any], files: ModelFiles, pooling_type: str | None) -> dict[str, Any]:
    """A config.json with the field "pooling", where something says how vectors are made: the checkpoint's files, for
    models that make some, or pooling_type in their place. Raises ConfigError for what is not supported."""
    if pooling_type is None and files.sentences.modules is None:
        return config
    return {**config, POOLING: files.sentences.pooling(config, pooling_type).plain}


def with_runner(config: dict[str, Any], files: ModelFiles, runner: str, convert: str) -> dict[str, Any]:
    """The config.json of the model that the settings ``runner`` and ``convert`` make of a checkpoint.

    A checkpoint with a language head gives vectors with runner "pooling", or where its folder has a modules.json of
    sentence-transformers: by its hidden states, or with convert "classify" by a classifier's head. The tokens of
    ``classifier_from_token`` become ``classifier_token_ids``. Raises ConfigError for what cannot be.
    """
    if runner == "generate" and convert != "none" and convert != "auto":
        raise ConfigError(f"convert is {convert!r}: the model is to generate text; give runner 'pooling' with it")
    made = dict(config)
    if (tokens := config.get("classifier_from_token")) is not None:
        made["classifier_token_ids"] = _token_ids(tokens, files)
    names: Sequence[str] = config.get("architectures") or ()  # `text_of` has checked it
    causal = next((end for end in _CAUSAL if names and names[0].endswith(end)), None)
    if runner == "pooling" or (runner == "auto" and (files.sentences.listed or convert in _CONVERTED)):
        if causal is not None:
            kind = "classify" if convert == "auto" and "classifier_from_token" in config else convert
            made["architectures"] = [names[0].removesuffix(causal) + _CONVERTED.get(kind, "Model")]
    elif runner == "generate" and names and causal is None:
        raise ConfigError(f"runner is 'generate': {names[0]} has no language head; use 'pooling'")
    return made


def _token_ids(tokens: Any, files: ModelFiles) -> list[int]:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f'classifier_from_token is {tokens!r:.80}: give a list of tokens, such as ["no", "yes"]')
    if files.vocabulary is None:
        raise ConfigError(
            f"classifier_from_token: {files.folder} has no tokenizer.json; give classifier_token_ids instead"
        )
    known = {**files.vocabulary.tokens, **files.vocabulary.added}
    if missing := [token for token in tokens if token not in known]:
        raise ConfigError(f"classifier_from_token: {missing[0]!r:.80} is no token of the model; give one that is")
    return [known[token] for token in tokens]


def with_implementation(config: dict[str, Any], model_impl: str) -> dict[str, Any]:
    """A config.json with the field "model_impl", where the setting decides something: transformers' code is wanted, or
    must not be taken although no family here has the architecture."""
    plain = {n: v for n, v in config.items() if n != MODEL_IMPL}
    if model_impl == "auto" or (model_impl == "graphllm" and is_named(config)):
        return plain
    return {**plain, MODEL_IMPL: model_impl}


def with_own_head(config: dict[str, Any], checkpoint: Checkpoint | None, prefix: str = "") -> dict[str, Any]:
    """A config.json that does not tie the head to the embedding, where the checkpoint has two different ones. prefix:
    before the names of a draft model's tensors."""
    tied = config.get("tie_word_embeddings")
    if tied is False or checkpoint is None or not has_own_head(checkpoint.tensors, prefix):
        return config
    if tied:
        _log.warning(
            "config.json: tie_word_embeddings is true, but %s is not the embedding: the head is not tied; set "
            "tie_word_embeddings to false", HEAD,
        )  # fmt: skip
    return {**config, "tie_word_embeddings": False}


def draft_config(config: dict[str, Any], method: str | None, names: Sequence[str]) -> dict[str, Any]:
    """A draft model's config.json with what graphllm needs of it. method: of `draft_method`. names: of its tensors."""
    if method is None:
        return with_architecture(config)
    drafter = {**config, "method": method}
    if method != "draft_model" and names:  # what it has outside of its layers decides what it shares with the model
        drafter["tensors"] = sorted(name for name in names if "layer" not in name)
    return drafter


def draft_method(config: Fields, names: Sequence[str]) -> str | None:
    """How a draft model drafts, where its config.json looks like any model's."""
    if "dflash_config" in config or "hidden_norm.weight" in names:
        return "dflash"
    if "fc.weight" in names:
        return "eagle3" if any(name.startswith(("midlayer.", "d2t")) for name in names) else "eagle"
    kind = config.get("model_type")
    return kind if kind in ("medusa", "mlp_speculator") else None
