"""The tree of all settings, `EngineConfig`: each part of the engine is given one group of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphllm.config.cache.kv_events import KVEventsConfig
from graphllm.config.compilation import CompileConfig
from graphllm.config.errors import ConfigError
from graphllm.config.parallel import ParallelConfig, check_parallel
from graphllm.config.pooling_config import PoolingType
from graphllm.config.setting import LEAST_TIER_BYTES, assemble, parse_bytes, parse_object, setting
from graphllm.config.speculation import SpeculationConfig
from graphllm.config.vllm.kv_transfer import KVTransferConfig, read_kv_transfer

_LOADING = "read when an engine is loaded; the compiled programs are the same"
_RUNNING = "read while an engine runs; the compiled programs are the same"
_FILES = "what the files say is in the key"
_Drafting = Literal["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and what its requests have in common."""

    model: str = setting(
        auto="the embedded model",
        written=str | Path,
        cli=False,  # an argument of some commands and an option of others
        help="Folder of a Hugging Face checkpoint, or a name of its hub.",
        key="what its config.json and its tensors say is in the key",
    )
    speculative_model: str | None = setting(
        None,
        written=str | Path | None,
        help="Folder or hub name of a draft model: each step verifies num_speculative_tokens drafts of it.",
        key="what its config.json and its tensors say is in the key",
    )
    speculative_method: _Drafting | None = setting(
        None,
        help="How speculative_model drafts; None: as its files say. Without one, mtp takes the further layers of the "
        "model's own checkpoint, and with the embedded model come draft_model, eagle3, medusa.",
        key="the config.json that is in the key has it",
    )
    skip_tokenizer_init: bool = setting(False, cli=False, help="Token ids in and out; no text.", key=_LOADING)
    seed: int | None = setting(0, help="Of requests without one; None: they differ each time.", key=_RUNNING)
    logits_processors: tuple[str, ...] = setting(
        (),
        written=Sequence[str | Callable[..., Any]],
        help="What edits the logits, as package.module:name; in Python also the functions or classes themselves.",
        key=_RUNNING,
    )
    structured_outputs_backend: Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"] = setting(
        "auto",
        help="What enforces structured outputs, where a request does not say; all but guidance are extras to install.",
        key=_RUNNING,
    )


@dataclass(frozen=True)
class FilesConfig:
    """Which files make the model, and where they come from."""

    revision: str | None = setting(
        None, help="Branch, tag or commit of a model on the hub; None: main.", key="the files' contents are in the key"
    )
    download_dir: str | None = setting(
        None,
        written=str | Path | None,
        help="Where models of the hub are kept; None: HF_HUB_CACHE, or where else its library keeps them.",
        key=_FILES,
    )
    hf_token: str | None = setting(
        None,
        written=str | bool | None,
        help="Token for private and gated models; None: HF_TOKEN, or what `hf auth login` left.",
        key=_FILES,
    )
    hf_config_path: str | None = setting(
        None,
        written=str | Path | None,
        help="Folder or hub name of another model's config.json, in place of the model's.",
        key=_FILES,
    )
    hf_overrides: dict[str, Any] | None = setting(
        None,
        written=dict | None,
        parse=functools.partial(parse_object, "hf_overrides"),
        help="Fields in place of those in config.json, as JSON.",
        key=_FILES,
    )
    model_impl: Literal["auto", "graphllm", "transformers"] = setting(
        "auto",
        help="Whose code defines the model. auto: graphllm's model_defs, and transformers' where that has no file of "
        "the architecture. graphllm: never transformers'. transformers: also where graphllm has a file.",
        key="the config.json that is in the key has it",
    )
    pooling_type: PoolingType | None = setting(
        None,
        help="Of which hidden states a model that gives vectors makes them: LAST, CLS (the first), MEAN, or ALL (one "
        "vector for each token); None: as the checkpoint's files say.",
        key="the config.json that is in the key has it",
    )
    runner: Literal["auto", "generate", "pooling"] = setting(
        "auto",
        help="What the model is for: text, or vectors of its hidden states. auto: vectors where it has no language "
        "head, or comes with modules.json of sentence-transformers.",
        key="the config.json that is in the key has it",
    )
    convert: Literal["auto", "none", "embed", "classify"] = setting(
        "auto",
        help="The head that a model with a language head gets for runner pooling: none (embed), or a classifier's.",
        key="the config.json that is in the key has it",
    )
    tokenizer: str | None = setting(
        None, written=str | Path | None, help="Folder or hub name of a tokenizer; None: the model's.", key=_LOADING
    )
    tokenizer_revision: str | None = setting(
        None, help="Branch, tag or commit of --tokenizer on the hub; None: main.", key=_LOADING
    )
    generation_config: str = setting(
        "auto",
        written=str | Path,
        help="Whose generation_config.json has the defaults of sampling parameters: auto is the model's, vllm none; or "
        "a folder or hub name.",
        key=_RUNNING,
    )
    override_generation_config: dict[str, Any] | None = setting(
        None,
        written=dict | None,
        parse=functools.partial(parse_object, "override_generation_config"),
        help="Fields in place of those in generation_config.json, as JSON.",
        key=_RUNNING,
    )


@dataclass(frozen=True)
class LoadConfig:
    """Where compiled programs and weights come from, and what they run on."""

    artifact: str = setting(
        "build",
        written=str | Path,
        help="build, use, require or rebuild; or the folder of an artifact. build compiles when none is in the cache, "
        "use then runs eagerly, require fails.",
        key="where to find what was compiled",
    )
    optimize: Literal["behind", "next_start", "first"] | None = setting(
        None,
        auto="GRAPHLLM_OPTIMIZE, else behind",
        help="How a model without an artifact begins on a CPU. behind: with prebuilt kernels, after seconds; its own "
        "code is compiled meanwhile, and taken between requests. next_start: taken at the next start. first: compiled "
        "before the start.",
        key=_LOADING,
    )
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = setting(
        "auto",
        help="auto: safetensors files, and pt (.bin files, which are converted once) only where there are none. dummy: "
        "random weights, for timing.",
        key="what its tensors are, or that there are none, is in the key",
    )
    threads: int | None = setting(
        None,
        help="Threads of a CPU's kernels, in each engine core; default: all CPUs that the process may use, shared out.",
        key=_LOADING,
        ge=1,
    )
    cpu_offload_gb: float = setting(
        0.0,
        help="GiB of weights, for each GPU, that stay in the host's memory; every step copies them to the GPU while it "
        "computes. 0: all are on the GPU.",
        key=_LOADING,
        ge=0,
    )


@dataclass(frozen=True)
class CacheConfig:
    """The memory of the cache."""

    kv_cache_memory_bytes: int | None = setting(
        None,
        parse=functools.partial(parse_bytes, "kv_cache_memory_bytes"),
        help="Memory of an engine core's cache, such as 2GiB; default: by gpu_memory_utilization, and on a CPU enough "
        "for every sequence at full length, at most a quarter of free memory.",
        key=_LOADING,
        ge=1,
    )
    gpu_memory_utilization: float = setting(0.9, help="Share of the GPU's memory to use.", key=_LOADING, gt=0, le=1)
    snapshot_memory_bytes: int | None = setting(
        None,
        parse=functools.partial(parse_bytes, "snapshot_memory_bytes"),
        help="Memory of copies of recurrent states, for prompts that begin alike; default: four copies for every "
        "sequence, at most an eighth of the cache's memory.",
        key=_LOADING,
        ge=0,
    )


def _tier_bytes(text: str) -> int:
    found = parse_bytes("kv_offloading_size", text)
    if 0 < found < LEAST_TIER_BYTES:
        raise ConfigError(f"kv_offloading_size is {text!r:.80}: less than a megabyte; give more, such as 1GiB")
    return found


@dataclass(frozen=True)
class TierConfig:
    """Where blocks of the cache are kept when they leave the device."""

    kv_offloading_size: int | None = setting(
        None,
        written=int | float | None,
        parse=_tier_bytes,
        help="Host memory for copies of the cache's blocks, of all ranks of an engine core together, such as 4GiB; a "
        "number below a million without a unit is GiB, as in vLLM; 0: none. It is taken as it is needed. Default: on "
        "GPUs a quarter of what the host has left, of all engine cores together, and at most four times the device's "
        "cache; on CPUs none.",
        key=_RUNNING,
        ge=0,
    )
    kv_offloading_policy: Literal["lru", "arc"] = setting(
        "lru",
        help="Which copies make room for others. lru: the least recently used. arc: it also weighs how often each was "
        "used.",
        key=_RUNNING,
    )
    kv_offloading_disk: str | None = setting(
        None,
        written=str | Path | None,
        help="Folder for copies of the cache's blocks that outlive the engine, in addition to kv_offloading_size; "
        "None: no copies on disk.",
        key=_RUNNING,
    )
    kv_offloading_disk_size: int | None = setting(
        None,
        parse=functools.partial(parse_bytes, "kv_offloading_disk_size"),
        help="Bytes of files in kv_offloading_disk, of all ranks together, such as 100GiB; default: half of what is "
        "free there at the start.",
        key=_RUNNING,
        ge=1,
    )
    kv_transfer_config: dict[str, Any] | None = setting(
        None,
        written=dict | None,
        parse=functools.partial(parse_object, "kv_transfer_config"),
        help="How blocks of the cache go to other engines and come from them, as vLLM's JSON object: kv_connector, "
        "kv_role and others, see docs/disaggregated-prefill.md. None: engines share nothing.",
        key=_RUNNING,
    )

    @property
    def transfer(self) -> KVTransferConfig | None:
        """The last, as an object. Raises ConfigError."""
        return read_kv_transfer(self.kv_transfer_config)


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests are put into steps, and what of earlier ones is used again."""

    enable_prefix_caching: bool = setting(True, help="Reuse the cache of beginnings that prompts share.", key=_RUNNING)
    token_vector_memory_bytes: int = setting(
        256 << 20,
        parse=functools.partial(parse_bytes, "token_vector_memory_bytes"),
        help="Of a model with a vector for each token: memory for the vectors of whole prompts, such as documents "
        "that are ranked again, in addition to enable_prefix_caching; 0: none.",
        key=_RUNNING,
        ge=0,
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", help="fcfs: first come, first served. priority: a request's own; lower goes first.", key=_RUNNING
    )
    max_num_queued_reqs: int | None = setting(
        None, help="Waiting requests above which new ones are refused; None: no limit.", key=_RUNNING, ge=0
    )
    long_prefill_token_threshold: int = setting(
        0, help="Tokens of one prompt in one step at most; 0: as many as fit.", key=_RUNNING, ge=0
    )
    scheduler_cls: str | None = setting(
        None,
        written=str | type | None,
        help="A subclass of `graphllm.engine.schedule.scheduler.Scheduler`, or its name as package.module:name.",
        key=_RUNNING,
    )
    cache_secret: str | None = setting(
        None, help="Engines with the same one may exchange cached prefixes; None: nobody can.", key=_RUNNING
    )
    kv_events_config: dict[str, Any] | None = setting(
        None,
        written=dict | None,
        parse=functools.partial(parse_object, "kv_events_config"),
        help="Publish what the prefix cache holds, for routers. A JSON object: enable_kv_cache_events, publisher (zmq "
        "or null), endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic.",
        key=_RUNNING,
    )
    snapshot_interval: int = setting(
        0,
        help="Tokens from one recurrent state that is kept for reuse to the next; 0: only the ends of prompts and of "
        "requests are kept, and where prompts part.",
        key=_RUNNING,
        ge=0,
    )


@dataclass(frozen=True)
class LogConfig:
    """What an engine tells of itself while it runs."""

    disable_log_stats: bool = setting(
        False, help="No line in the log every ten seconds with the throughput and the load.", key=_RUNNING
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        help="Send OpenTelemetry a span for each request, to this URL; needs graphllm[otel].",
        key=_RUNNING,
    )


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters while an engine runs; `CompileConfig` has the settings of their tables."""

    max_cpu_loras: int | None = setting(
        None,
        help="Adapters that are kept in the host's memory, at least max_loras; None: as many as that.",
        key=_RUNNING,
        ge=1,
    )


@dataclass(frozen=True)
class SleepConfig:
    """Giving memory back while nothing runs: docs/sleep.md."""

    enable_sleep_mode: bool = setting(
        False,
        help="The engine can sleep: it gives back the memory of weights and cache, and takes it again at waking.",
        key=_RUNNING,
    )
    requests_while_asleep: Literal["wait", "refuse"] = setting(
        "wait",
        help="What happens to requests that come while the engine sleeps. wait: they run after it wakes up. refuse: "
        "they get an error at once.",
        key=_RUNNING,
    )


@dataclass(frozen=True)
class EngineConfig:
    """Every setting. `EngineArgs`, the options of the command line and docs/settings.md are generated from this tree,
    and its groups are what the compiler, a core and a scheduler are given."""

    model: ModelConfig
    files: FilesConfig
    load: LoadConfig
    compilation: CompileConfig
    cache: CacheConfig
    tiers: TierConfig
    scheduler: SchedulerConfig
    speculation: SpeculationConfig
    lora: LoRAConfig
    parallel: ParallelConfig
    log: LogConfig
    sleep: SleepConfig

    @staticmethod
    def check(values: Mapping[str, Any]) -> None:
        """Raise ConfigError for values, by the settings' names, that cannot be together."""
        ranks = (values["tensor_parallel_size"] or 1) * values["pipeline_parallel_size"]
        check_parallel(assemble(ParallelConfig, values), ranks)
        _check_tiers(assemble(TierConfig, values))
        _check_offloading(values)
        KVEventsConfig.read(values["kv_events_config"]).check_ranks(values["data_parallel_size"])


def _check_tiers(tiers: TierConfig) -> None:
    """Raise ConfigError for a setting of tiers that needs another one, or names no folder."""
    if tiers.kv_offloading_disk is not None and not str(tiers.kv_offloading_disk).strip():
        raise ConfigError("kv_offloading_disk is '': give a folder for files, or leave it out")
    if tiers.kv_offloading_disk is not None and not tiers.kv_offloading_size:
        raise ConfigError(
            f"kv_offloading_disk is {str(tiers.kv_offloading_disk)!r:.80}: blocks reach it by way of host memory; "
            "give kv_offloading_size, too, such as 1GiB"
        )
    if tiers.kv_offloading_disk_size is not None and tiers.kv_offloading_disk is None:
        raise ConfigError(
            f"kv_offloading_disk_size is {tiers.kv_offloading_disk_size}: there is no folder for files; give "
            "kv_offloading_disk, too"
        )
    if tiers.transfer is not None and not tiers.kv_offloading_size:
        raise ConfigError(
            f"kv_transfer_config has kv_connector {tiers.transfer.kv_connector!r:.80}: blocks come and go by way of "
            "host memory; give kv_offloading_size, too, such as 4GiB"
        )


def _check_offloading(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for what weights in the host's memory cannot be together with."""
    wrong = {
        "enable_sleep_mode": "an engine with such weights does not sleep",
        "enable_eplb": "experts in the host's memory do not move",
    }
    for name, reason in wrong.items():
        if values["cpu_offload_gb"] and values[name]:
            raise ConfigError(
                f"cpu_offload_gb is {values['cpu_offload_gb']:g} and {name} is True: {reason}; leave one of them out"
            )


@dataclass(frozen=True)
class Peers:
    """Of an engine core that shares experts: its number, how many there are, and the file by which they meet."""

    rank: int
    count: int
    meeting: str


@dataclass(frozen=True)
class CoreConfig:
    """The parts that an engine core reads, as plain data that can cross to its process; what was compiled it reads from
    the artifact. load.artifact: a verified folder. stop_ids: tokens that end a text, from the tokenizer. tokenizer: the
    folder of the tokenizer.json that grammars are made for, None for the model's. peers: the cores that this one shares
    experts with. successor: the folder of an artifact of the same model that is being compiled, to be taken when it is
    there."""

    model: ModelConfig
    load: LoadConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    stop_ids: tuple[int, ...] = ()
    log: LogConfig = LogConfig()
    tokenizer: str | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    peers: Peers | None = None
    successor: str | None = None
    sleep: SleepConfig = field(default_factory=SleepConfig)
    tiers: TierConfig = TierConfig()
