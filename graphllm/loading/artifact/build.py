"""Find the artifact of a model and its settings, check it, and build it where that is asked for.

The compiler is imported only when something must be built.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from graphllm.config import Bucket, CompileConfig, ConfigError, EngineArgs, Env, ParallelConfig, definitions
from graphllm.config.setting import assemble, key_fields, plain
from graphllm.host.build_lock import build_lock
from graphllm.host.compiler import check_compiler
from graphllm.host.garbage_collection import keep_all, no_collections
from graphllm.loading.artifact.resolve import check_devices, compile_config, kernel_threads
from graphllm.loading.checkpoint.source import Source
from graphllm.loading.memory import check_cache_memory
from graphllm.program import artifact
from graphllm.program.artifact import Artifact
from graphllm.weights.loading import baked

_log = logging.getLogger(__name__)
Policy = Literal["build", "use", "require", "rebuild"]
POLICIES = get_args(Policy)
Progress = Callable[[str, int, int], None]


def artifact_folder(source: Source, config: CompileConfig, env: Env) -> Path:
    """Where the cache keeps the artifact of this model and config."""
    key = artifact.key_of(artifact.key_factors(source.config, source.tensors, config))
    return env.cache_dir / "artifacts" / f"{Path(source.name).name}-{key[:16]}"


def find_or_build(
    source: Source,
    config: CompileConfig,
    env: Env,
    policy: Policy,
    progress: Progress,
    folder: Path | None = None,
    bake: bool = False,
) -> Artifact:
    """A verified artifact.

    policy: "build" uses the cached one or builds it, "use" runs eagerly when there is none, "require" fails when there
    is none, "rebuild" always builds. folder: look for and put it there instead of the cache. bake: what is built holds
    its weights.
    """
    found = _found_or_built(source, config, env, policy, progress, folder, bake)
    if unread := found.manifest.unread:
        _log.warning("config.json: %s: not read, and without effect here", ", ".join(unread))
    return found


def _found_or_built(
    source: Source, config: CompileConfig, env: Env, policy: Policy, progress: Progress, folder: Path | None, bake: bool
) -> Artifact:
    place = folder or artifact_folder(source, config, env)
    if policy != "rebuild" and (found := _find(source, place)) is not None:
        return found
    if policy == "require":
        raise artifact.ArtifactError(f"--artifact require: there is none at {place}; make it with `graphllm compile`")
    if policy == "use":
        config = replace(config, backend="eager")
        return _found_or_built(source, config, env, "build", progress, None, False)
    if folder:
        artifact.check_replaceable(folder)
    with build_lock(place):
        if policy == "build" and (found := _find(source, place)) is not None:  # another process has built it
            return found
        _build(source, config, env, progress, place, bake)
    return Artifact.open(place)


def _find(source: Source, place: Path) -> Artifact | None:
    """The artifact at ``place``, verified; None when there is none. Raises ConfigError when it was made for another
    model or machine."""
    if not (place / "manifest.json").exists():
        return None
    found = Artifact.open(place)
    found.check_machine()
    _check_model(found, source)
    return found


def _build(source: Source, config: CompileConfig, env: Env, progress: Progress, place: Path, bake: bool) -> None:
    """Compile into the folder ``place``."""
    native = config.target.device == "cpu" and config.backend == "inductor"
    if native:
        check_compiler()
    tensors, complete = source.tensors, None
    if config.dump is not None:
        try:
            config.dump.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise ConfigError(
                f"dump is {str(config.dump)!r:.200}: no folder can be made there ({failure.strerror}); give another one"
            ) from failure
    if bake:
        if source.checkpoint is None:
            raise ConfigError("bake_weights: there are none with --load-format dummy; leave one of the two out")
        complete = functools.partial(baked.bake, checkpoint=source.checkpoint)
    from graphllm.compile.codegen.objects import Objects
    from graphllm.compile.tuning.workers import open_workers

    # On a GPU, garbage may hold memory that tuning needs.
    collections = _compiling() if native else contextlib.nullcontext()
    kept = env.cache_dir / "objects" if native else None
    with collections, Objects(kept) as objects, open_workers(config) as workers:
        if native:
            objects.guess()
        from graphllm.compile.building import Tools
        from graphllm.compile.families import find_model
        from graphllm.compile.pipeline import compile_model

        model = find_model(source.config)
        c = model.config(source.config)
        if source.checkpoint is not None:
            from graphllm.weights.plan.match import check_checkpoint
            from graphllm.weights.plan.plan import make_plan
            from graphllm.weights.plan.schemes import as_quantized

            plan = as_quantized(make_plan(model, c, config.dtype), source.config, source.checkpoint.tensors)
            check_checkpoint(plan, source.checkpoint)
        longest = c.max_len
        if config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}: the model was made for {longest} positions at most"
            )
        origin = {"name": source.name, "commit": source.commit}
        tools = Tools(objects, workers, env.cache_dir / "tuned")
        stored = source.checkpoint.tensors if source.checkpoint else None
        compile_model(source.config, tensors, config, place, progress, tools, complete, origin, stored)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """While the compiler is imported and runs, Python does not look for garbage, and what is left is not looked through
    later either: that would take 0.7 s and return 10 MB."""
    with no_collections():
        try:
            yield
        finally:
            keep_all()


def _check_model(found: Artifact, source: Source) -> None:
    """Raise ConfigError unless the artifact was made for this model. One with weights needs no checkpoint, but fits to
    the one that is there."""
    unseen = found.is_baked and source.absent is not None
    found.check_model(source.config, None if unseen else source.tensors)
    if found.is_baked and source.checkpoint is not None:
        baked.check_source(found.folder, source.checkpoint)


def take_artifact(source: Source, args: EngineArgs, progress: Progress) -> tuple[Artifact, int | None]:
    """`find_or_build` for what a user may say, a policy or the folder of an artifact: a verified artifact, and the
    threads of its kernels. Settings that do not fit the machine are refused before anything is built."""
    folder = None if args.artifact in POLICIES else Path(args.artifact)
    if folder is not None and not (folder / "manifest.json").exists():
        raise ConfigError(
            f"artifact: {str(folder)!r} is neither one of {', '.join(POLICIES)} nor the folder of an artifact"
        )
    policy: Any = "require" if folder else args.artifact
    config = compile_config(source.config, args)
    device: str = config.target.device
    if folder is not None:
        device = Artifact.trusted(folder).device
    cores = assemble(ParallelConfig, vars(args)).cores
    threads = kernel_threads(args.threads, device, cores)
    check_devices(device, cores, config.tensor_parallel_size * args.pipeline_parallel_size)
    check_cache_memory(args, device)
    found = find_or_build(source, config, Env.read(), policy, progress, folder)
    if folder is not None:
        _check_said(found, args)
    return found, threads


def _check_said(found: Artifact, args: EngineArgs) -> None:
    """Raise ConfigError where a user asks for what an artifact was not compiled for."""
    compiled: dict[str, Any] = {**key_fields(found.config), "target": found.device}
    for name, d in definitions(CompileConfig).items():
        said = getattr(args, name)
        if d.not_key is not None or said == d.unsaid:
            continue
        has = functools.reduce(operator.getitem, (*d.path, name), compiled)
        if has != plain(said):
            raise ConfigError(
                f"{name} is {_shown(name, plain(said))}: the artifact {found.folder} was compiled with "
                f"{_shown(name, has)}; leave the option out, or compile again with it"
            )


def _shown(name: str, value: Any) -> str:
    """A setting as users write it."""
    if name == "buckets":
        return ",".join(Bucket(**b).name for b in value)
    return "none" if value is None else str(value)
