"""From `EngineArgs` to a model that is ready to load: its checkpoint, its artifact, its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from graphllm.config import ConfigError, CoreConfig, EngineArgs
from graphllm.config.sampling import SamplingParams
from graphllm.config.setting import assemble
from graphllm.engine.options import LogitsProcessor, name_of
from graphllm.engine.text import Tokenizer
from graphllm.entrypoints.build import Progress, take_artifact
from graphllm.entrypoints.source import open_source

_log = logging.getLogger(__name__)


class ResolvedModel(NamedTuple):
    """A model with its artifact, ready for `load_core`. defaults: sampling parameters of requests that name none.
    processors: logits processors that are objects."""

    config: CoreConfig
    tokenizer: Tokenizer | None
    defaults: SamplingParams
    processors: list[LogitsProcessor]


def log_progress() -> Progress:
    """Tells the log each stage of a compilation once."""
    told: set[str] = set()

    def progress(stage: str, finished: int, total: int) -> None:
        if stage not in told:
            told.add(stage)
            _log.info("compiling: %s", stage)

    return progress


def resolve_model(
    args: EngineArgs,
    progress: Progress | None = None,
    sampling: Mapping[str, Any] | None = None,
    base: SamplingParams | None = None,
) -> ResolvedModel:
    """Find the checkpoint and its artifact, which is built when the policy says so.

    progress: of building it; None tells the log. sampling: fields of sampling parameters that come before the
    checkpoint's defaults, and ``base`` what holds where it has none. Raises ConfigError, before anything is built where
    that is possible.
    """
    if (args.tensor_parallel_size or 1) != 1:
        raise ConfigError(f"tensor_parallel_size is {args.tensor_parallel_size}: an engine runs on one device; use 1")
    source = open_source(args.model, args.load_format, args.speculative_model)
    defaults = SamplingParams.from_fields(sampling or {}, SamplingParams.from_checkpoint(source.folder, base))
    tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_folder(source.folder)
    place, threads = take_artifact(source, args, progress or log_progress())
    scheduler = args.scheduler_cls
    functions = [p for p in args.logits_processors if not isinstance(p, str)]
    resolved = {
        "model": str(source.folder),
        "speculative_model": None if args.speculative_model is None else str(args.speculative_model),
        "artifact": str(place),
        "threads": threads,
        "logits_processors": tuple(p for p in args.logits_processors if isinstance(p, str)),
        "scheduler_cls": scheduler if isinstance(scheduler, str | None) else name_of("scheduler_cls", scheduler),
        "stop_ids": tuple(sorted(tokenizer.stop_ids)) if tokenizer else (),
    }
    return ResolvedModel(assemble(CoreConfig, vars(args) | resolved), tokenizer, defaults, functions)
