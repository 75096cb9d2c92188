"""From a checkpoint folder and settings to a verified artifact and a running engine: find it, check it, build it,
load it.

The one place where the serving side meets the compiler, which is imported only when something must be built.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from graphllm import artifact
from graphllm.config import Bucket, CompileConfig, ConfigError, Env, Quantization, Target, key_fields
from graphllm.engine.options import EngineOptions
from graphllm.machine import detect_target, gpu_memory
from graphllm.runtime.fresh import CacheMemory
from graphllm.weights import baked
from graphllm.weights.checkpoint import Checkpoint, WeightError, fingerprint, has_weights

if TYPE_CHECKING:
    from graphllm.engine.core import EngineCore
    from graphllm.engine.options import LogitsProcessor
    from graphllm.runtime.executor import Executor

Policy = Literal["build", "use", "require", "rebuild"]
POLICIES = get_args(Policy)
# Bytes of a GPU for kernels, libraries, graphs and what allocations are rounded up to: 0.22 to 0.34 GB measured, see
# bench/results/h200_proofs.json.
_BESIDE = 300 * 10**6
_REHEARSED = 128  # tokens of a prompt
_REHEARSALS = 8  # after 2 the first request takes 1.25 times as long as later ones, after 8 1.15
_LARGE_GPU = 70e9  # bytes of memory from which 1,024 sequences are worth their tables and activations
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Overrides:
    """What a user may set; None takes the default for the model and the machine (`compile_config`)."""

    target: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["inductor", "eager"] = "inductor"
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    buckets: tuple[Bucket, ...] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    tune: bool | None = None
    jobs: int = 0
    quantize: Quantization | None = None


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, opened: its config.json and the headers of its tensors. absent: why there are none, where
    they were asked for."""

    folder: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    absent: WeightError | None = None

    @property
    def tensors(self) -> str:
        """Digest of the tensor names, shapes and dtypes. Raises WeightError when there are none."""
        if self.absent is not None:
            raise self.absent
        return fingerprint(self.checkpoint) if self.checkpoint else "random weights"


def open_source(folder: str | Path, random: bool = False) -> Source:
    """Read a checkpoint folder; ``random``: only its config.json, weights will be random numbers.

    Without tensors the folder may still do, for an artifact that holds its weights. Raises ConfigError naming what else
    is missing or unreadable.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise ConfigError(
            f"model: {folder} is not a folder; give the folder of a Hugging Face checkpoint (config.json, safetensors)"
        )
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as missing:
        raise ConfigError(
            f"model: {folder} has no config.json; give the folder of a Hugging Face checkpoint"
        ) from missing
    except ValueError as damage:
        raise ConfigError(f"model: {path} is not valid JSON ({damage})") from damage
    if not isinstance(config, dict):
        raise ConfigError(f"model: {path} holds no JSON object; give the folder of a Hugging Face checkpoint")
    try:
        return Source(folder, config, None if random else Checkpoint.open(folder))
    except WeightError as absent:
        if has_weights(folder):
            raise
        return Source(folder, config, None, absent)


def compile_config(model_config: Mapping[str, Any], wanted: Overrides) -> CompileConfig:
    """The full compile config: the user's settings, and defaults for this model and machine.

    dtype: the checkpoint's, bfloat16 for float32 checkpoints on a GPU. max_model_len: the model's own.
    """
    target = detect_target(wanted.target)
    text = model_config.get("text_config", model_config)
    positions = text.get("max_position_embeddings") or text.get("n_positions") or 2048
    stored: Any = model_config.get("dtype") or model_config.get("torch_dtype") or "float32"
    cuda = target.device == "cuda"
    usual = max((b.hi for b in wanted.buckets or () if b.kind == "mixed"), default=8192 if cuda else 2048)
    max_num_batched_tokens = (
        max(usual, wanted.max_num_seqs or 0) if wanted.max_num_batched_tokens is None else wanted.max_num_batched_tokens
    )
    many = (1024 if gpu_memory() >= _LARGE_GPU else 256) if cuda else 64
    max_num_seqs = min(many, max_num_batched_tokens) if wanted.max_num_seqs is None else wanted.max_num_seqs
    config = CompileConfig(
        target=target,
        backend=wanted.backend,
        dtype=wanted.dtype or ("bfloat16" if cuda and stored == "float32" else stored),
        buckets=wanted.buckets or default_buckets(target, max_num_seqs, max_num_batched_tokens),
        max_model_len=positions if wanted.max_model_len is None else wanted.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=16 if wanted.block_size is None else wanted.block_size,
        tune=cuda if wanted.tune is None else wanted.tune,
        jobs=wanted.jobs,
        quantize=wanted.quantize,
    )
    check(config)
    return config


def check(config: CompileConfig) -> None:
    """Raise ConfigError for settings that cannot work together."""
    for name, smallest in (("max_model_len", 2), ("max_num_batched_tokens", 2), ("max_num_seqs", 1), ("block_size", 1)):
        found = getattr(config, name)
        if found < smallest:
            raise ConfigError(f"{name} is {found}: it must be at least {smallest}")
    if config.dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype is {config.dtype!r}: use bfloat16, float16 or float32")
    if config.quantize not in (None, *get_args(Quantization)):
        raise ConfigError(
            f"quantize is {config.quantize!r}: use {' or '.join(get_args(Quantization))}, or leave it out"
        )
    if config.quantize and config.target.device != "cpu":
        raise ConfigError(
            f"quantize is {config.quantize}: there are kernels for it on a CPU only; leave it out, or use --target cpu"
        )
    for b in config.buckets:
        if not 1 <= b.lo <= b.hi or (b.lo == 1 and b.hi > 1):
            raise ConfigError(f"buckets: {b.name} is no range; 1 is a bucket of its own, ranges start at 2")
    largest = max((b.hi for b in config.buckets if b.kind == "mixed"), default=0)
    if largest < 2:
        raise ConfigError("buckets: none takes prompts; add a mixed one such as mixed-2-2048")
    if not config.max_num_seqs <= config.max_num_batched_tokens <= largest:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}: it must be at least max_num_seqs, "
            f"{config.max_num_seqs}, and at most what the mixed buckets take, {largest}"
        )


def default_buckets(target: Target, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """One sequence alone is static; the rest of decode is split where other kernels win on a GPU."""
    found = [Bucket("decode", 1, 1)]
    edges = [16, 32, 64, 128, 256, max_num_seqs] if target.device == "cuda" else [max_num_seqs]
    low = 2
    for edge in edges:
        if low <= min(edge, max_num_seqs):
            found.append(Bucket("decode", low, min(edge, max_num_seqs)))
            low = edge + 1
    return (*found, Bucket("mixed", 2, max_num_batched_tokens))


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """Buckets from ``decode-1,decode-2-64,mixed-2-2048``. Raises ConfigError naming the part that is wrong."""
    out = []
    for part in text.split(","):
        kind, *bounds = part.strip().split("-")
        if kind not in ("decode", "mixed") or len(bounds) not in (1, 2) or not all(b.isdigit() for b in bounds):
            raise ConfigError(f"buckets: {part!r} is not of the form decode-1, decode-2-64 or mixed-2-2048")
        out.append(Bucket(kind, int(bounds[0]), int(bounds[-1])))  # type: ignore[arg-type]
    return tuple(out)


def artifact_folder(source: Source, config: CompileConfig, env: Env) -> Path:
    """Where the cache keeps the artifact of this model and config."""
    key = artifact.key_of(artifact.key_factors(source.config, source.tensors, config))
    return env.cache_dir / "artifacts" / f"{source.folder.resolve().name}-{key[:16]}"


def find_or_build(
    source: Source,
    config: CompileConfig,
    env: Env,
    policy: Policy,
    progress: Progress,
    folder: Path | None = None,
    bake: bool = False,
) -> tuple[Path, dict[str, Any]]:
    """A verified artifact and its manifest.

    policy: "build" uses the cached one or builds it, "use" runs eagerly when there is none, "require" fails when there
    is none, "rebuild" always builds. folder: look for and put it there instead of the cache. bake: what is built holds
    its weights.
    """
    place = folder or artifact_folder(source, config, env)
    if policy != "rebuild" and (place / "manifest.json").exists():
        manifest = artifact.verify(place)
        artifact.check_machine(place, manifest)
        _check_model(place, manifest, source)
        return place, manifest
    if policy == "require":
        raise artifact.ArtifactError(f"--artifact require: there is none at {place}; make it with `graphllm compile`")
    if policy == "use":
        config = replace(config, backend="eager")
        return find_or_build(source, config, env, "build", progress)
    if folder:
        artifact.check_replaceable(folder)
    tensors, complete = source.tensors, None
    if bake:
        if source.checkpoint is None:
            raise ConfigError("bake_weights: there are none with --load-format dummy; leave one of the two out")
        complete = functools.partial(baked.bake, checkpoint=source.checkpoint)
    from graphllm.compile.objects import Objects

    native = config.target.device == "cpu" and config.backend == "inductor"
    # On a GPU, garbage may hold memory that tuning needs.
    collections = _no_collections() if native else contextlib.nullcontext()
    with collections, Objects(env.cache_dir / "objects" if native else None) as objects:
        if native:
            objects.guess()
        from graphllm.compile.pipeline import compile_model, find_model

        model = find_model(source.config)
        c = model.config(source.config)
        if source.checkpoint is not None:
            from graphllm.weights.match import check_checkpoint
            from graphllm.weights.plan import make_plan

            check_checkpoint(make_plan(model, c, config.dtype), source.checkpoint)
        longest = c.max_len
        if config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}: the model was made for {longest} positions at most"
            )
        compile_model(source.config, tensors, config, place, progress, env.cache_dir / "tuned", complete, objects)
    return place, artifact.verify(place)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """While the compiler is imported and runs, Python does not look for garbage: it would walk through a million
    objects again and again, a sixth of the time. What is left is not looked through later either: that would take 0.7 s
    and return 10 MB."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules report what is not collected in the end
        if collects:
            gc.enable()


def _check_model(place: Path, manifest: Mapping[str, Any], source: Source) -> None:
    """Raise ConfigError unless the artifact was made for this model. One with weights needs no checkpoint, but fits to
    the one that is there."""
    has_weights = baked.is_baked(place)
    unseen = has_weights and source.absent is not None
    tensors = manifest["factors"]["checkpoint"] if unseen else source.tensors
    artifact.check_model(place, manifest, source.config, tensors)
    if has_weights and source.checkpoint is not None:
        baked.check_source(place, source.checkpoint)


def take_artifact(
    source: Source, wanted: Overrides, artifact: str | Path, progress: Progress
) -> tuple[Path, Literal["cpu", "cuda"]]:
    """`find_or_build` for what a user may say, a policy or the folder of an artifact: a verified artifact and its
    device."""
    folder = None if artifact in POLICIES else Path(artifact)
    if folder is not None and not (folder / "manifest.json").exists():
        raise ConfigError(
            f"artifact: {str(artifact)!r} is neither one of {', '.join(POLICIES)} nor the folder of an artifact"
        )
    policy: Any = "require" if folder else artifact
    place, manifest = find_or_build(source, compile_config(source.config, wanted), Env.read(), policy, progress, folder)
    compiled = manifest["factors"]["compile"]
    if folder is not None:
        _check_wanted(folder, compiled, wanted)
    return place, compiled["target"]["device"]


def _check_wanted(folder: Path, compiled: Mapping[str, Any], wanted: Overrides) -> None:
    """Raise ConfigError where a user asks for what the artifact at ``folder`` was not compiled for."""
    has = {**compiled, "target": compiled["target"]["device"]}
    unsaid = Overrides()
    asked = {n: value for n, value in key_fields(wanted).items() if n != "jobs" and value != getattr(unsaid, n)}
    for name, value in asked.items():
        if has[name] != value:
            raise ConfigError(
                f"{name} is {value}: the artifact {folder} was compiled with {has[name]}; leave the option out, or "
                "compile again with it"
            )


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine core is made of, as plain data that can cross to its process.

    model: checkpoint folder. artifact: verified folder. random: random weights. kv_memory: bytes for the cache; None
    takes what ``gpu_memory_utilization`` leaves on a GPU, and on a CPU enough for every sequence at full length, at
    most a quarter of free memory. threads: of a CPU's kernels, None for torch's choice. processors: logits processors
    as "package.module:name".
    """

    model: str
    artifact: str
    random: bool = False
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    threads: int | None = None
    stop_ids: tuple[int, ...] = ()
    options: EngineOptions = EngineOptions()
    processors: tuple[str, ...] = ()


def load_core(
    settings: CoreSettings,
    phases: Callable[[str, float], None] = lambda name, seconds: None,
    processors: Sequence[LogitsProcessor] = (),
) -> EngineCore:
    """Load weights, open the artifact and make an engine core.

    phases: told the seconds of each start-up phase. processors: further logits processors, as objects. Raises
    ConfigError when memory does not suffice.
    """
    clock = _Phases(phases)
    manifest = artifact.verify(Path(settings.artifact))
    cache = _cache_memory(manifest, settings)
    clock("artifact")
    import torch

    from graphllm.runtime.stream import alone

    clock("import torch")
    threads = settings.threads or torch.get_num_threads()
    with alone():
        return _load(settings, manifest, cache, processors, threads, clock)


def _cache_memory(manifest: Mapping[str, Any], settings: CoreSettings) -> CacheMemory | None:
    """A CPU's paged cache, whose memory comes while torch is imported."""
    if manifest["factors"]["compile"]["target"]["device"] != "cpu":
        return None
    tensors = json.loads((Path(settings.artifact) / "program.json").read_text())["kv"]["tensors"]
    pages = _kv_pages(manifest, settings.kv_memory, settings.gpu_memory_utilization)
    return CacheMemory(tensors, pages, manifest["memory"]["kv page"] // max(1, tensors))


def _load(
    settings: CoreSettings,
    manifest: Mapping[str, Any],
    cache: CacheMemory | None,
    processors: Sequence[LogitsProcessor],
    threads: int,
    clock: Callable[[str], None],
) -> EngineCore:
    import torch

    from graphllm.engine.core import EngineCore
    from graphllm.engine.grammar import GrammarCompiler
    from graphllm.runtime.executor import Executor
    from graphllm.weights.integers import KERNELS
    from graphllm.weights.loader import load_weights
    from graphllm.weights.plan import WeightPlan
    from graphllm.weights.random import random_weights

    place = Path(settings.artifact)
    source = open_source(settings.model, settings.random)
    named = [_named(name) for name in settings.processors]
    compiled = manifest["factors"]["compile"]
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    device = compiled["target"]["device"]
    if baked.is_baked(place):
        weights = baked.open_weights(place, device)
    elif source.absent is not None:
        raise source.absent
    elif source.checkpoint is not None:
        weights = load_weights(plan, source.checkpoint, device, kernels=place / KERNELS)
    else:
        weights = random_weights(plan, device, kernels=place / KERNELS)
    if device == "cuda":
        torch.cuda.synchronize()
    clock("weights")
    pages = cache.pages if cache else _kv_pages(manifest, settings.kv_memory, settings.gpu_memory_utilization)
    executor = Executor(place, manifest, weights, pages, threads, cache)
    grammars = None
    if (source.folder / "tokenizer.json").is_file():
        grammars = GrammarCompiler(source.folder, executor.vocab, frozenset(settings.stop_ids))
    clock("executor")
    if device == "cuda":
        executor.warm_up()
        rehearse(executor, compiled["max_model_len"])
        clock("warm up")
    return EngineCore(executor, compiled["max_model_len"], settings.options, grammars, [*named, *processors])


def rehearse(executor: Executor, max_model_len: int) -> None:
    """Serve short requests with an engine core that is thrown away: the first time, host code is slow too."""
    from graphllm.engine.core import EngineCore
    from graphllm.engine.params import SamplingParams
    from graphllm.engine.request import EngineRequest

    core = EngineCore(executor, max_model_len, EngineOptions())
    length = min(_REHEARSED, max_model_len - 2)
    for turn in range(_REHEARSALS):
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        core.add(EngineRequest(id=f"{turn}", prompt=[turn] * length, params=params, stop_ids=[], limit=2, seed=0))
        while core.unfinished:
            core.step()


def gpu_bytes(memory: Mapping[str, int], pages: int) -> int:
    """What a GPU's memory holds in all, by the manifest's memory table: exact but for the share beside it."""
    parts = sum(memory[name] for name in ("weights", "arena", "state"))
    return parts + 4 * memory["zeroed"] + pages * memory["kv page"] + _BESIDE


def _named(name: str) -> LogitsProcessor:
    """The object behind "package.module:name". Raises ConfigError when there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as missing:
        raise ConfigError(
            f"logits_processors: {name!r} cannot be imported ({missing}); give package.module:name"
        ) from missing


def _kv_pages(manifest: Mapping[str, Any], kv_memory: int | None, utilization: float) -> int:
    """Pages of the cache, with the null page, which is no request's; on a GPU, of what the weights have left."""
    compiled, memory = manifest["factors"]["compile"], manifest["memory"]
    full = -(-compiled["max_model_len"] // compiled["block_size"])
    most = None
    if kv_memory is None and compiled["target"]["device"] == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        kv_memory = int(free - (1 - utilization) * total) - (gpu_bytes(memory, 0) - memory["weights"])
    elif kv_memory is None:
        kv_memory = max(0, _available_memory() - memory["weights"]) // 4
        # A full batch of the longest sequences, and room for the prefix cache.
        most = 4 * full * compiled["max_num_seqs"] * manifest["groups"] + 1
    pages = kv_memory // memory["kv page"]
    if pages < 2:
        raise ConfigError(
            f"kv cache: {kv_memory / 1e6:.1f} MB left for it, it needs {2 * memory['kv page'] / 1e6:.1f} MB at least; "
            "raise --kv-cache-memory or --gpu-memory-utilization"
        )
    return int(pages if most is None else min(pages, most))


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30


def parse_bytes(option: str, text: str) -> int:
    """Bytes of "2GiB", "500MB" or a plain number. Raises ConfigError naming the option when it is neither."""
    lowered = text.strip().lower().removesuffix("b")
    digits = lowered.rstrip("kmgi")
    try:
        return int(float(digits) * _UNITS[lowered[len(digits) :]])
    except (ValueError, KeyError, OverflowError) as damage:
        raise ConfigError(f"{option}: {text!r} is no amount of memory; write 2GiB, 500MB or bytes") from damage


class _Phases:
    def __init__(self, report: Callable[[str, float], None]) -> None:
        self._report, self._last = report, time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self._report(name, now - self._last)
        self._last = now
