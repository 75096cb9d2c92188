"""From `EngineArgs` to a model that is ready to load: its checkpoint, its artifact, its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graphllm.config import ConfigError, CoreConfig, EngineArgs
from graphllm.config.requests.pooling_params import Vectors, vectors_of
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.setting import assemble
from graphllm.config.vllm.kv_transfer import read_kv_transfer
from graphllm.engine.requests.options import LogitsProcessor
from graphllm.engine.requests.processor import GrammarChecker
from graphllm.engine.requests.request import CoreInfo
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.structured.compilers import GrammarCompilers
from graphllm.host.importing import name_of
from graphllm.loading.artifact.build import Progress, take_artifact
from graphllm.loading.checkpoint.source import Source, find_generation_config, find_source, find_tokenizer
from graphllm.loading.checkpoint.unread_files import warn_unread
from graphllm.loading.tiers.disk_folder import absolute_folder

_log = logging.getLogger(__name__)


class ResolvedModel(NamedTuple):
    """A model with its artifact, ready for `load_core`. defaults: sampling parameters of requests that name none.
    processors: logits processors that are objects. name: of the model, for people.
    vectors: what they are, of a model that gives some."""

    config: CoreConfig
    tokenizer: Tokenizer | None
    defaults: SamplingParams
    processors: list[LogitsProcessor]
    name: str
    vectors: Vectors = Vectors()


def log_progress() -> Progress:
    """Logs each stage of a compilation once."""
    seen: set[str] = set()

    def progress(stage: str, finished: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
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
    if args.node_rank:
        raise ConfigError(
            f"node_rank is {args.node_rank}: the engine is on node 0; start `graphllm serve --headless` with these "
            "settings on this one"
        )
    if (transfer := read_kv_transfer(args.kv_transfer_config)) is not None:
        from graphllm.engine.transfer.connectors import find_connector  # only those who transfer wait for it

        find_connector(transfer)
    source = find_source(args)
    generation = find_generation_config(args, source)
    folder = None if args.skip_tokenizer_init else find_tokenizer(args, source)
    tokenizer = None if folder is None else Tokenizer.from_folder(folder, source.config, generation)
    listed = {} if args.generation_config == "vllm" else generation
    base = SamplingParams.of_model(listed, args.override_generation_config or {}, base)
    defaults = SamplingParams.from_fields(sampling or {}, base)
    sentences = source.files.sentences
    vectors = vectors_of(source.config, sentences.pooling(source.config, args.pooling_type))
    warn_unread(generation, sentences, tokenizer, tokenizer.config if tokenizer else {})
    taken = take_artifact(source, args, progress or log_progress())
    scheduler = args.scheduler_cls
    proposer = args.draft_proposer
    functions = [p for p in args.logits_processors if not isinstance(p, str)]
    resolved = {
        "model": str(source.folder),
        "speculative_model": None if source.draft is None else str(source.draft),
        "tokenizer": None if folder is None else str(folder),
        "artifact": str(taken.artifact.folder),
        "threads": taken.threads,
        "successor": None if taken.successor is None else str(taken.successor),
        "logits_processors": tuple(p for p in args.logits_processors if isinstance(p, str)),
        "scheduler_cls": scheduler if isinstance(scheduler, str | None) else name_of("scheduler_cls", scheduler),
        "draft_proposer": proposer if isinstance(proposer, str | None) else name_of("draft_proposer", proposer),
        "kv_offloading_disk": absolute_folder(args.kv_offloading_disk),
        "stop_ids": tuple(sorted(tokenizer.stop_ids)) if tokenizer else (),
    }
    return ResolvedModel(
        assemble(CoreConfig, vars(args) | resolved), tokenizer, defaults, functions, source.name, vectors
    )


def checkpoint_defaults(args: EngineArgs, source: Source, base: SamplingParams | None = None) -> SamplingParams:
    """The sampling parameters that a generation_config.json and its overrides give, ``base`` for what they leave open.
    Raises ConfigError for a damaged file and for values that cannot be."""
    generation = find_generation_config(args, source)
    listed = {} if args.generation_config == "vllm" else generation
    return SamplingParams.of_model(listed, args.override_generation_config or {}, base)


def grammar_maker(resolved: ResolvedModel) -> Callable[[CoreInfo], GrammarChecker] | None:
    """Makes what checks constraints; a model without a tokenizer has none."""
    folder = Path(resolved.config.tokenizer or resolved.config.model.model)
    stop_ids = frozenset(resolved.config.stop_ids)
    backend = resolved.config.model.structured_outputs_backend

    def make(info: CoreInfo) -> GrammarChecker:
        return GrammarCompilers(folder, info.vocab, stop_ids, backend)

    return make if resolved.tokenizer else None
