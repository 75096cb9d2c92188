"""What a user has said, made complete for a model and a machine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, get_args

from graphllm.config import (
    CompileConfig,
    ConfigError,
    EngineArgs,
    ParallelConfig,
    check,
    default_buckets,
    definitions,
)
from graphllm.config.compilation import Quantization
from graphllm.config.fields import MOST, section, whole
from graphllm.config.setting import assemble
from graphllm.config.token_tree import token_tree
from graphllm.host.machine import detect_target, gpu_count, gpu_memory, total_memory, usable_cores
from graphllm.weights.checkpoint.checkpoint import DRAFT

_LARGE_GPU = 70e9  # bytes of memory from which 1,024 sequences are worth their tables and activations
# One part in so many of what the weights leave is for states of slots: beside a cache of blocks, and without one.
_BESIDE_BLOCKS, _ALONE = 4, 2


class TooManySequencesError(Exception):
    """The states of as many sequences as usual leave too little memory. most: a power of two that does not."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most


def room_of_rank(args: EngineArgs, config: CompileConfig) -> int:
    """Bytes of this machine's memory for the weights, states and cache of one rank. Stages of a pipeline count as one
    rank, since they divide the layers among them."""
    if config.target.device == "cuda":
        return int(gpu_memory() * args.gpu_memory_utilization) * args.pipeline_parallel_size
    return total_memory() // (config.tensor_parallel_size * assemble(ParallelConfig, vars(args)).cores)


def check_fitting(room: int, weights: int, each: int, block: int, wanted: int) -> None:
    """Raise TooManySequencesError where the recurrent states of so many sequences leave too little for the cache, and
    for snapshots.

    room: see `room_of_rank`.
    weights, each, block: bytes of a rank's weights, of one sequence's states, and of a block of the cache.
    """
    share = _BESIDE_BLOCKS if block else _ALONE
    fitting = max(room - weights, room // 8) // share // each if each else wanted
    if fitting < wanted:
        raise TooManySequencesError(1 << max(0, fitting.bit_length() - 1))


def compile_config(model_config: Mapping[str, Any], args: EngineArgs) -> CompileConfig:
    """What to compile: the user's settings, and for this model and machine what they leave open.

    model_config: a ``config.json``. Raises ConfigError for settings that cannot work together.
    """
    target = detect_target(args.target)
    text = section(model_config, "text_config") or model_config
    named = (model_config.get(name) for name in ("dtype", "torch_dtype"))
    stored = next((name for name in named if name is not None), "float32")
    cuda = target.device == "cuda"
    usual = max((b.hi for b in args.buckets or () if b.kind == "mixed"), default=8192 if cuda else 2048)
    max_num_batched_tokens = (
        max(usual, args.max_num_seqs or 0) if args.max_num_batched_tokens is None else args.max_num_batched_tokens
    )
    many = (1024 if gpu_memory() >= _LARGE_GPU else 256) if cuda else 64
    max_num_seqs = min(many, max_num_batched_tokens) if args.max_num_seqs is None else args.max_num_seqs
    counts = ("max_trained_positions", "max_position_embeddings", "n_positions")
    positions = next((name for name in counts if text.get(name) is not None), counts[-1])
    # The first rows of RoBERTa's table are for padding, which has no position.
    after_padding = str(text.get("model_type")).endswith(("roberta", "camembert"))
    unused = whole(text, "pad_token_id", 1, 1, ge=0) + 1 if after_padding else 0
    drafts = args.num_speculative_tokens
    if not drafts and args.speculative_token_tree is not None:
        drafts = token_tree(args.speculative_token_tree).drafts
    if not drafts and (drafter := section(model_config, DRAFT)):
        # What the draft model was made for; MLP speculators call it n_predict, Medusa has a head for each.
        said = ("num_speculative_tokens", "n_predict", "medusa_num_heads", "num_heads", "num_nextn_predict_layers")
        drafts = next((whole(drafter, name) for name in said if drafter.get(name)), 0)
        block = {**drafter, **section(drafter, "dflash_config")}
        if not drafts and "block_size" in block:  # the first token of a block is known
            drafts = whole(block, "block_size", ge=2) - 1
    automatic: dict[str, Any] = {
        "target": target,
        "dtype": "bfloat16" if cuda and stored == "float32" else stored,
        "buckets": default_buckets(
            target, max_num_seqs, max_num_batched_tokens, drafts, args.dynamic_speculative_tokens, args.deterministic
        ),
        "max_model_len": whole(text, positions, 2048, le=MOST) - unused,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "tune": cuda,
        "data_parallel_experts": sharing_cores(args),
    }
    chosen = {name: getattr(args, name) for name, d in definitions(CompileConfig).items()
            if d.setting.auto is None or getattr(args, name) != d.unsaid}  # fmt: skip
    method = args.quantization
    if method is not None:
        schemes = importlib.import_module("graphllm.weights.plan.schemes")  # all formats of checkpoints
        if method not in get_args(Quantization) or schemes.is_own_method(model_config, method):
            schemes.check_method(model_config, method)
            chosen["quantization"] = None
    if chosen["kv_cache_dtype"] == chosen.get("dtype", automatic["dtype"]):
        chosen["kv_cache_dtype"] = "auto"
    if chosen["mamba_ssm_cache_dtype"] == "float32":
        chosen["mamba_ssm_cache_dtype"] = "auto"
    made = automatic | chosen | {"target": target, "num_speculative_tokens": drafts}
    config: CompileConfig = assemble(CompileConfig, made)
    check(config)
    return config


def sharing_cores(args: EngineArgs) -> int:
    """How many engine cores have experts together where the user does not say."""
    separate = args.data_parallel_rank is not None or args.tensor_parallel_size > 1
    return args.data_parallel_size if args.enable_expert_parallel and not separate else 1


def kernel_threads(threads: int | None, device: str, cores: int = 1) -> int | None:
    """Threads for a CPU's kernels in each engine core: as the user says, else as OMP_NUM_THREADS does (None), else one
    for each CPU that this process may use. cores: how many engine cores share the CPUs. Raises ConfigError for more
    threads than CPUs, and on a GPU."""
    if device != "cpu":
        if threads is not None:
            raise ConfigError(
                f"threads is {threads}: it is for kernels on a CPU, and this runs on {device}; leave it out"
            )
        return None
    if threads is None:
        return None if "OMP_NUM_THREADS" in os.environ else max(1, usable_cores() // cores)
    if not 1 <= threads <= usable_cores():
        raise ConfigError(f"threads is {threads}: give 1 to {usable_cores()}, the CPUs that this process may use")
    return threads


def check_devices(device: str, cores: int, each: int) -> None:
    """Raise ConfigError unless there are ``each`` GPUs for each of ``cores`` engine cores. A CPU is shared."""
    if device == "cuda" and cores > 1 and (there := gpu_count()) < cores * each:
        of = "" if each == 1 else f", of {each} GPUs each"
        raise ConfigError(
            f"data_parallel_size is {cores}{of}: that takes {cores * each} GPUs, and this process sees {there}; give "
            f"{there // each or 1} or less, or more GPUs in CUDA_VISIBLE_DEVICES"
        )


def check_offloading(gigabytes: float, device: str) -> None:
    """Raise ConfigError for weights in the host's memory on a CPU."""
    if gigabytes and device == "cpu":
        raise ConfigError(
            f"cpu_offload_gb is {gigabytes:g}: on a CPU all weights lie in the host's memory; leave it out"
        )
