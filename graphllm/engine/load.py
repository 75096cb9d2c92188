"""What `LLM`, `AsyncLLM` and the commands are given, and how it becomes a model that is ready to load."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from graphllm import prepare
from graphllm.config import ConfigError, Quantization
from graphllm.engine.options import EngineOptions, LogitsProcessor
from graphllm.engine.params import SamplingParams
from graphllm.engine.text import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineArgs:
    """A model and how to run it. Names and meanings are vLLM's where it has them; None is the default for model and
    machine.

    model: a checkpoint folder, None for the embedded model. quantize: "int8" or "int4" for the weights of linear
    layers, on a CPU. max_model_len: tokens of prompt and output. max_num_seqs,
    max_num_batched_tokens: of one step. block_size: tokens of a cache page. kv_cache_memory_bytes, else
    gpu_memory_utilization of the whole device. max_num_queued_reqs: waiting requests above which new ones are refused.
    seed: of requests without one. load_format: "dummy" for random weights. skip_tokenizer_init: token ids in and out.
    logits_processors: functions, or "package.module:name". target, backend, artifact: as of `graphllm run`; artifact is
    "build", "use", "require", "rebuild" or a folder. threads: of a CPU's kernels; all CPUs the process may use.
    """

    model: str | Path | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantize: Quantization | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    seed: int | None = 0
    load_format: Literal["auto", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    logits_processors: Sequence[str | LogitsProcessor] = ()
    target: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["inductor", "eager"] = "inductor"
    artifact: str | Path = "build"
    threads: int | None = None


class Opened(NamedTuple):
    """A model with its artifact, ready for `prepare.load_core`. defaults: what its generation_config.json asks for.
    processors: logits processors that are objects."""

    settings: prepare.CoreSettings
    tokenizer: Tokenizer | None
    defaults: SamplingParams
    processors: list[LogitsProcessor]


def open_model(args: EngineArgs) -> Opened:
    """Find the checkpoint and its artifact, which is built when the policy says so. Raises ConfigError."""
    from graphllm.embedded import MODEL_DIR

    source = prepare.open_source(MODEL_DIR if args.model is None else args.model, args.load_format == "dummy")
    tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_folder(source.folder)
    wanted = prepare.Overrides(
        target=args.target,
        backend=args.backend,
        dtype=None if args.dtype == "auto" else args.dtype,
        quantize=args.quantize,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
    )
    told: set[str] = set()

    def progress(stage: str, finished: int, total: int) -> None:
        if stage not in told:
            told.add(stage)
            _log.info("compiling: %s", stage)

    place, device = prepare.take_artifact(source, wanted, args.artifact, progress)
    settings = prepare.CoreSettings(
        model=str(source.folder),
        artifact=str(place),
        random=args.load_format == "dummy",
        kv_memory=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        threads=kernel_threads(args.threads, device),
        stop_ids=tuple(sorted(tokenizer.stop_ids)) if tokenizer else (),
        options=EngineOptions(
            enable_prefix_caching=args.enable_prefix_caching,
            scheduling_policy=args.scheduling_policy,
            max_num_queued_reqs=args.max_num_queued_reqs,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
        ),
        processors=tuple(p for p in args.logits_processors if isinstance(p, str)),
    )
    functions = [p for p in args.logits_processors if not isinstance(p, str)]
    return Opened(settings, tokenizer, SamplingParams.from_checkpoint(source.folder), functions)


def kernel_threads(threads: int | None, device: str) -> int | None:
    """Threads for a CPU's kernels: as the user says, else as OMP_NUM_THREADS does (None), else one for each CPU that
    this process may use. Raises ConfigError for more than those, and on a GPU."""
    from graphllm.machine import usable_cores

    if device != "cpu":
        if threads is not None:
            raise ConfigError(
                f"threads is {threads}: it is for kernels on a CPU, and this runs on {device}; leave it out"
            )
        return None
    if threads is None:
        return None if "OMP_NUM_THREADS" in os.environ else usable_cores()
    if not 1 <= threads <= usable_cores():
        raise ConfigError(f"threads is {threads}: give 1 to {usable_cores()}, the CPUs that this process may use")
    return threads
