"""Model families: the family that serves a ``config.json``, with a draft graph joined to it; its Config of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphllm.compile.tasks.draft_family import joined
from graphllm.config import ConfigError
from graphllm.config.fields import MODEL_IMPL, raw, strings, switch
from graphllm.ir.model import Model, derived_model
from graphllm.ir.registry import load_models
from graphllm.weights.checkpoint.checkpoint import DRAFT


def find_model(model_config: Mapping[str, Any]) -> Model:
    """The family that serves a ``config.json``, with the draft graph of the one that is in its field "draft". Raises
    ConfigError with the list of known architectures."""
    if model_config.get(DRAFT) is None:
        return _family(model_config)
    return local_model(model_config, 1, False)[0]


def local_model(model_config: Mapping[str, Any], degree: int, experts_apart: bool) -> tuple[Model, Any]:
    """The same family for one of ``degree`` tensor-parallel ranks, and that rank's Config. A draft graph that cannot be
    divided is whole on every rank. experts_apart: see `Model.local`. Raises ConfigError."""
    model = _family(model_config)
    c = model.local(model.config(model_config), degree, experts_apart)
    if (drafts := model_config.get(DRAFT)) is None:
        return model, c
    drafter = _drafter(model_config, drafts)
    own = drafter.config(drafts)
    return joined(model, c, drafter, drafter.local(own, degree, experts_apart) if drafter.shardable else own), c


def _drafter(model_config: Mapping[str, Any], drafts: Mapping[str, Any]) -> Model:
    """The family of a draft model: the one of its field "method", or that its architecture names."""
    method, known = drafts.get("method"), load_models()
    if method in (None, "draft_model"):
        family = _family(drafts)
        if method is not None and family.method:
            raise ConfigError(f"the draft model is no language model: its method is {family.method}, not draft_model")
        return family
    found = {id(m): m for m in known.values() if m.method == method}.values()
    fitting = [m for m in found if not m.part_of or set(strings(model_config, "architectures")) & set(m.part_of)]
    named = [m for m in fitting if set(strings(drafts, "architectures")) & set(m.architectures)]
    if not fitting:
        there = sorted({"draft_model", *(m.method for m in known.values() if m.method)})
        parts = [name for m in found for name in m.part_of]
        problem = f"is for {', '.join(parts)}" if parts else f"there is not; there are {', '.join(there)}"
        raise ConfigError(f"speculative_method is {method!r:.80}: that {problem}")
    return (named or fitting)[0]


def _family(model_config: Mapping[str, Any]) -> Model:
    """By the field "model_impl": "transformers" is transformers' code, "graphllm" never that, and without the field
    it is what is taken where no family has the architecture."""
    names, known = strings(model_config, "architectures"), load_models()
    wanted = raw(model_config, MODEL_IMPL)
    own = (known.get(names[0]) or derived_model(names[0])) if names else None
    if own is not None and wanted != "transformers":
        return own
    why = "model_impl is 'graphllm', which leaves it out; use auto"
    if wanted != "graphllm":
        try:
            return adopted(model_config)
        except ConfigError as problem:
            why = str(problem)
    if own is not None:
        raise ConfigError(f"model_impl is 'transformers': {why}; use auto, which takes graphllm's own {names[0]}")
    raise ConfigError(_unknown(model_config, known, why))


def adopted(model_config: Mapping[str, Any]) -> Model:
    """The family that transformers' own code defines, which is imported only here. Raises ConfigError."""
    from graphllm.compile.transformers_model import family

    if switch(model_config, "is_encoder_decoder", False):
        raise ConfigError("config.json: is_encoder_decoder is true: only decoders alone run; use a decoder-only model")
    return family.adopted(model_config)


def _unknown(model_config: Mapping[str, Any], known: Mapping[str, Model], why: str) -> str:
    """What is said of an architecture that nobody has. why: transformers' code does not serve."""
    names, kind = strings(model_config, "architectures"), model_config.get("model_type")
    if "auto_map" in model_config:
        return (
            f"config.json: auto_map says that {(names or [kind])[0]} is code of the repository's own, which never "
            f"runs, with trust_remote_code neither. Of transformers' own code: {why}. Use a model of a known "
            "architecture, or write it as docs/adding-a-model.md shows"
        )
    kinds: dict[str, list[str]] = {"generating text": [], "giving vectors": [], "drafting": []}
    for name, model in sorted(known.items()):
        task = "giving vectors" if model.graphs[0].task == "pool" else "generating text"
        kinds["drafting" if model.method else task].append(name)
    listed = "; ".join(f"for {kind} {', '.join(of)}" for kind, of in kinds.items())
    inner = ", nor is it one of the multimodal models that run as text" if "text_config" in model_config else ""
    return (
        f"config.json architectures: {list(names) or 'missing'} (model_type {kind!r:.80}) is not supported{inner}. "
        f"Known: {listed}. Nor is it one of transformers' models that are traced: {why}. docs/adding-a-model.md shows "
        "how to add one in a file of your own"
    )
