"""Whose code defines a model, as far as a config.json tells: by names, without importing a family or torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from graphllm.config.fields import DRAFT, MODEL_IMPL, section
from graphllm.host.machine import plugin_files, source_files

_ARCHITECTURE = re.compile(r"""["'](\w+)["']""")
# Ends of names of models that transformers' code is not taken for, as it is for what generates text.
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_HEADLESS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForRewardModel",
             "ForProcessRewardModel")  # fmt: skip


def is_named(model_config: Mapping[str, Any]) -> bool:
    """Whether the architecture of a config.json stands in the source of a family here, or of a plugin. False where the
    file names none, which is refused elsewhere."""
    names = model_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        return False
    return name in _named() or (name.endswith(_HEADLESS) and not name.endswith(_CAUSAL))


def versions_of_model(model_config: Mapping[str, Any]) -> dict[str, str]:
    """The versions that the traced model depends on: of transformers, where the model or its draft model may be its.
    None otherwise."""
    found, drafts = [model_config], section(model_config, DRAFT)
    if drafts and drafts.get("method") in (None, "draft_model"):
        found.append(drafts)
    if any(c.get(MODEL_IMPL) == "transformers" or not is_named(c) for c in found):
        return {"transformers": version("transformers")}
    return {}


@functools.cache
def _named() -> frozenset[str]:
    """Every quoted word in the source of families and plugins."""
    files = [*source_files(Path(__file__).parents[1] / "model_defs"), *plugin_files()]
    return frozenset(name for file in files for name in _ARCHITECTURE.findall(file.read_text(encoding="utf-8")))
