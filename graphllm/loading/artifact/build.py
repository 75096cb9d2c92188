"""Find the artifact of a model and its settings, check it, and build it where that is asked for.

The compiler is imported only when something must be built (`graphllm.loading.artifact.compiling`).
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from graphllm.config import Bucket, CompileConfig, ConfigError, EngineArgs, Env, ParallelConfig, definitions
from graphllm.config.fields import MODEL_IMPL
from graphllm.config.setting import assemble, key_fields, plain
from graphllm.embedded import ARTIFACT_DIR, MODEL_DIR
from graphllm.host.build_lock import build_lock
from graphllm.host.compiler import check_compiler
from graphllm.host.prebuilt import find_library
from graphllm.loading.artifact.behind import compile_behind
from graphllm.loading.artifact.resolve import (
    TooManySequencesError,
    check_devices,
    check_fitting,
    check_offloading,
    compile_config,
    kernel_threads,
    room_of_rank,
)
from graphllm.loading.checkpoint.source import Source
from graphllm.loading.memory import check_cache_memory
from graphllm.program import artifact
from graphllm.program.artifact import Artifact
from graphllm.weights.loading.baked_on_host import check_source

_log = logging.getLogger(__name__)
Policy = Literal["build", "use", "require", "rebuild"]
POLICIES = get_args(Policy)
OPTIMIZE = ("behind", "next_start", "first")
Progress = Callable[[str, int, int], None]
_T = TypeVar("_T")


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
    room: int = 0,
) -> Artifact:
    """A verified artifact.

    policy: "build" uses the cached one or builds it, "use" runs eagerly when there is none, "require" fails when there
    is none, "rebuild" always builds. folder: look for and put it there instead of the cache. bake: what is built holds
    its weights. room: see `graphllm.loading.artifact.compiling.build`.
    """
    found = _found_or_built(source, config, env, policy, progress, folder, bake, room)
    if (made := found.manifest.implementation).transformers:
        _log.warning("model: %s; graphllm inspect %s tells more", made, found.folder)
    if unread := found.manifest.unread:
        _log.warning("config.json: %s: not read, and without effect here", ", ".join(unread))
    return found


def _found_or_built(
    source: Source, config: CompileConfig, env: Env, policy: Policy, progress: Progress, folder: Path | None,
    bake: bool, room: int,
) -> Artifact:  # fmt: skip
    place = folder or artifact_folder(source, config, env)
    if policy != "rebuild" and (found := _find(source, place)) is not None:
        if room:  # it may be from a machine with more memory
            memory = found.memory
            each = found.program.slot_bytes * found.config.longest_query
            check_fitting(room, memory.weights, each, memory.block, found.config.max_num_seqs)
        return found
    if policy == "require":
        if room:  # there may be one with fewer sequences
            importlib.import_module("graphllm.loading.artifact.slots").check_sequences(source, config, room)
        raise artifact.ArtifactError(f"--artifact require: there is none at {place}; make it with `graphllm compile`")
    if policy == "use":
        config = replace(config, backend="eager")
        return _found_or_built(source, config, env, "build", progress, None, False, room)
    if folder:
        artifact.check_replaceable(folder)
    with build_lock(place):
        if policy == "build" and (found := _find(source, place)) is not None:  # another process has built it
            return found
        _build(source, config, env, progress, place, bake, room)
    return Artifact.open(place)


def _find(source: Source, place: Path) -> Artifact | None:
    """The artifact at ``place``, verified; None when there is none. Raises ConfigError when it was made for another
    model or machine."""
    if not (place / "manifest.json").exists():
        return None
    found = Artifact.open(place)
    found.check_machine()
    _check_model(found, source)
    if found.config.backend == "prebuilt" and not all(map(find_library, found.program.libraries)):
        return None  # made again, with the libraries
    return found


def _build(
    source: Source, config: CompileConfig, env: Env, progress: Progress, place: Path, bake: bool, room: int
) -> None:
    """Compile into the folder ``place``."""
    if config.target.device == "cpu" and config.backend == "inductor":
        check_compiler()
    if config.dump is not None:
        try:
            config.dump.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise ConfigError(
                f"dump is {str(config.dump)!r:.200}: no folder can be made there ({failure.strerror}); give another one"
            ) from failure
    if bake and source.checkpoint is None:
        raise ConfigError("bake_weights: there are none with --load-format dummy; leave one of the two out")
    importlib.import_module("graphllm.loading.artifact.compiling").build(
        source, source.tensors, config, env, progress, place, bake, room
    )


def _check_model(found: Artifact, source: Source) -> None:
    """Raise ConfigError unless the artifact was made for this model. One with weights needs no checkpoint, but fits to
    the one that is there."""
    unseen = found.is_baked and source.absent is not None
    found.check_model(source.config, None if unseen else source.tensors)
    if found.is_baked and source.checkpoint is not None:
        check_source(found.folder, source.checkpoint)


def fitting(source: Source, args: EngineArgs, env: Env, take: Callable[[CompileConfig, int], _T]) -> _T:
    """What ``take`` makes of `compile_config`, and of `room_of_rank` where max_num_seqs is the usual one, else 0. Where
    the states of as many sequences would take too much memory, of a config with fewer; the cache notes how many, for
    each size of memory, since machines may share it."""
    config = compile_config(source.config, args)
    if args.max_num_seqs is not None:
        return take(config, 0)
    place, room = artifact_folder(source, config, env), room_of_rank(args, config)
    note = place.with_name(f".{place.name}.{room >> 30}.sequences")
    try:
        most = int(note.read_text())
    except (OSError, ValueError):
        try:
            return take(config, room)
        except TooManySequencesError as found:
            most = found.most
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(str(most))
    _log.warning(
        "max_num_seqs is %d, not %d: the recurrent states of more sequences would take too much of the memory; "
        "--max-num-seqs says another number", most, config.max_num_seqs,
    )  # fmt: skip
    return take(compile_config(source.config, replace(args, max_num_seqs=most)), 0)


class Taken(NamedTuple):
    """What an engine begins with.

    artifact: verified.
    threads: of its kernels.
    successor: where the model's optimized artifact is being compiled; None where nothing better will come, or it waits
        for the next start.
    """

    artifact: Artifact
    threads: int | None
    successor: Path | None = None


def take_artifact(source: Source, args: EngineArgs, progress: Progress) -> Taken:
    """`find_or_build` for what a user may say, a policy or the folder of an artifact. Settings that do not fit the
    machine are refused before anything is built."""
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
    check_offloading(args.cpu_offload_gb, device)
    env = Env.read()
    optimize = args.optimize or env.optimize
    if optimize not in OPTIMIZE:
        raise ConfigError(f"GRAPHLLM_OPTIMIZE is {optimize!r:.80}: give one of {', '.join(OPTIMIZE)}")
    if folder is not None:
        found = find_or_build(source, config, env, policy, progress, folder)
        _check_said(found, args)
        return Taken(found, threads)

    def take(config: CompileConfig, room: int) -> Taken:
        if policy == "build" and optimize != "first" and begins_prebuilt(source, config, env):
            place, soon = artifact_folder(source, config, env), shipped(source, config)
            if soon is None:
                prebuilt = replace(config, backend="prebuilt")
                soon = find_or_build(source, prebuilt, env, "build", progress, room=room)
            compile_behind(source, config, env, place)
            return Taken(soon, threads, place if optimize == "behind" else None)
        return Taken(find_or_build(source, config, env, policy, progress, room=room), threads)

    return fitting(source, args, env, take)


def begins_prebuilt(source: Source, config: CompileConfig, env: Env) -> bool:
    """Whether an engine begins with prebuilt kernels: on a CPU, where the optimized artifact is not there."""
    native = config.target.device == "cpu" and config.backend == "inductor"
    # Other kernels round otherwise, and a deterministic engine's texts must not depend on when they are taken.
    return native and not config.deterministic and _find(source, artifact_folder(source, config, env)) is None


def shipped(source: Source, config: CompileConfig) -> Artifact | None:
    """The artifact of prebuilt kernels that comes with the embedded model; None where the settings are others, and
    where its kernels are not there."""
    other = source.folder != MODEL_DIR or MODEL_IMPL in source.config
    if other or not (ARTIFACT_DIR / "manifest.json").exists():
        return None
    found = Artifact.open(ARTIFACT_DIR)
    wanted, there = (
        key_fields(c) | {"target": c.target.device} for c in (replace(config, backend="prebuilt"), found.config)
    )
    lacking = {*found.config.target.arch} - {*config.target.arch}
    if wanted != there or lacking or not all(map(find_library, found.program.libraries)):
        return None
    found.check_model(source.config, source.tensors)
    return found


def _check_said(found: Artifact, args: EngineArgs) -> None:
    """Raise ConfigError where a user asks for what an artifact was not compiled for."""
    compiled: dict[str, Any] = {**key_fields(found.config), "target": found.device}
    automatic = {"kv_cache_dtype": found.config.dtype, "mamba_ssm_cache_dtype": "float32"}  # what auto means
    for name, d in definitions(CompileConfig).items():
        said = getattr(args, name)
        if d.not_key is not None or said == d.unsaid:
            continue
        has = functools.reduce(operator.getitem, (*d.path, name), compiled)
        if has != plain(said) and not (has == "auto" and said == automatic.get(name)):
            raise ConfigError(
                f"{name} is {_shown(name, plain(said))}: the artifact {found.folder} was compiled with "
                f"{_shown(name, has)}; leave the option out, or compile again with it"
            )


def _shown(name: str, value: Any) -> str:
    """A setting as users write it."""
    if name == "buckets":
        return ",".join(Bucket(**b).name for b in value)
    return "none" if value is None else str(value)
