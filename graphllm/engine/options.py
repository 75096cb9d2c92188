"""What users may put into an engine: logits processors, and objects by their names. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.config.sampling import SamplingParams

if TYPE_CHECKING:
    import torch


class Row(NamedTuple):
    """What a logits processor is told of one row: the request's id, its tokens so far (drafts before the row included,
    where they are verified), its ``extra_args`` and all of its parameters. in_prompt: a row inside the prompt, which
    only reports log-probabilities."""

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    extra_args: dict[str, object]
    params: SamplingParams
    in_prompt: bool = False


# Edits float32 logits [R, V] in place, one row for each entry of the list; docs/logits-processors.md has an example.
LogitsProcessor = Callable[["torch.Tensor", Sequence[Row]], None]


def rowwise(processor: object) -> bool:
    """Whether a logits processor says of itself that what it does to a row follows from the row and what it is told of
    it. Then it may be asked for rows behind drafts, of which some will not have been."""
    return getattr(processor, "rowwise", False) is True


def imported(setting: str, name: str) -> Any:
    """The object behind "package.module:name", or "package.module.name". Raises ConfigError when there is none."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as missing:
        raise ConfigError(f"{setting}: {name!r} cannot be imported ({missing}); give package.module:name") from missing


def name_of(setting: str, found: Any) -> str:
    """The name under which another process finds a class or a function. Raises ConfigError for one that is not at the
    top of a module."""
    name = getattr(found, "__qualname__", type(found).__qualname__)
    if not name.isidentifier():
        raise ConfigError(f"{setting} is {name}: put it at the top of a module")
    return f"{found.__module__}:{name}"
