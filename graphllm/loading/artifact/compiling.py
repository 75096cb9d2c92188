"""Building an artifact: what the compiler is given of a checkpoint and of this machine. Importing this imports the
compiler, but no torch: workers are started before that."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from graphllm.compile.codegen.objects import Objects
from graphllm.compile.tuning.workers import open_workers
from graphllm.config import CompileConfig, ConfigError, Env
from graphllm.config.fields import MAX_MODEL_LEN
from graphllm.host.garbage_collection import keep_all, no_collections
from graphllm.loading.checkpoint.source import Source
from graphllm.program.artifact import libraries_of
from graphllm.program.program import read_program
from graphllm.weights.plan.match import check_checkpoint
from graphllm.weights.plan.plan import make_plan
from graphllm.weights.plan.schemes import as_quantized


def build(
    source: Source,
    tensors: str,
    config: CompileConfig,
    env: Env,
    progress: Callable[[str, int, int], None],
    place: Path,
    bake: bool,
    room: int = 0,
) -> None:
    """Compile into the folder ``place``. tensors: the digest of ``source``. Raises ConfigError where
    the checkpoint does not fit the model.

    room: see `room_of_rank`, where nobody has said how many sequences; 0 where somebody has. Raises
    TooManySequencesError where it is enough for fewer."""
    native = config.target.device == "cpu" and config.backend != "eager"
    # On a GPU, garbage may hold memory that tuning needs.
    collections = _compiling() if native else contextlib.nullcontext()
    kept = env.cache_dir / "objects" if native else None
    with collections, Objects(kept) as objects, open_workers(config) as workers:
        if native and config.backend == "inductor":
            objects.guess()
        pipeline = importlib.import_module("graphllm.compile.pipeline")  # with torch, while objects are compiled
        _check(pipeline.find_model(source.config), source, config)
        if room:
            importlib.import_module("graphllm.loading.artifact.slots").check_sequences(source, config, room)
        complete = None
        if bake:
            complete = functools.partial(_bake, source)
        origin = {"name": source.name, "commit": source.commit}
        tools = pipeline.Tools(objects, workers, env.cache_dir / "tuned")
        stored = source.checkpoint.tensors if source.checkpoint else None
        pipeline.compile_model(source.config, tensors, config, place, progress, tools, complete, origin, stored)


def _bake(source: Source, building: Path) -> None:
    """Add the finished weights to the artifact."""
    libraries = libraries_of(building, read_program(building).libraries)
    importlib.import_module("graphllm.weights.loading.baked").bake(building, source.checkpoint, libraries)


def _check(model: Any, source: Source, config: CompileConfig) -> None:
    """Raise ConfigError where the checkpoint, or the longest context, does not fit the model."""
    c = model.config({**source.config, MAX_MODEL_LEN: config.max_model_len})
    if source.checkpoint is not None:
        plan = as_quantized(make_plan(model, c, config.dtype), source.config, source.checkpoint.tensors)
        check_checkpoint(plan, source.checkpoint)
    longest = c.max_len
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}: the model was made for {longest} positions at most"
        )


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """While the compiler is imported and runs, Python does not look for garbage. What is left is not looked through
    later either: that would take 0.7 s and return 10 MB."""
    with no_collections():
        try:
            yield
        finally:
            keep_all()
