"""Generated from the definitions in graphllm/config/; `python -m graphllm.config.stub` prints it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, Unpack

from graphllm.config.compilation import Bucket

class EngineSettings(TypedDict, total=False):
    speculative_model: str | Path | None
    speculative_method: Literal["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash"] | None
    skip_tokenizer_init: bool
    seed: int | None
    logits_processors: Sequence[str | Callable[..., Any]]
    structured_outputs_backend: Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"]
    revision: str | None
    download_dir: str | Path | None
    hf_token: str | bool | None
    hf_config_path: str | Path | None
    hf_overrides: dict[str, Any] | str | None
    model_impl: Literal["auto", "graphllm", "transformers"]
    pooling_type: Literal["LAST", "CLS", "MEAN", "ALL"] | None
    runner: Literal["auto", "generate", "pooling"]
    convert: Literal["auto", "none", "embed", "classify"]
    tokenizer: str | Path | None
    tokenizer_revision: str | None
    generation_config: str | Path
    override_generation_config: dict[str, Any] | str | None
    artifact: str | Path
    optimize: Literal["behind", "next_start", "first"] | None
    load_format: Literal["auto", "safetensors", "pt", "dummy"]
    threads: int | None
    cpu_offload_gb: float
    target: Literal["auto", "cpu", "cuda"]
    backend: Literal["inductor", "prebuilt", "eager"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    quantization: str | None
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8"]
    mamba_ssm_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"]
    snapshot_dtype: Literal["auto", "int8"]
    quantization_rules: Sequence[str] | str
    buckets: Sequence[Bucket] | str | None
    max_model_len: int | str | None
    max_num_seqs: int | str | None
    max_num_batched_tokens: int | str | None
    block_size: int | None
    max_logprobs: int
    max_logit_bias: int
    tensor_parallel_size: int
    enable_expert_parallel: bool
    data_parallel_experts: int | None
    enable_eplb: bool
    num_redundant_experts: int
    num_speculative_tokens: int
    dynamic_speculative_tokens: bool
    speculative_token_tree: str | None
    prompt_lookup_max: int
    prompt_lookup_min: int
    draft_sample_method: Literal["greedy", "probabilistic"]
    rejection_sample_method: Literal["standard", "typical", "synthetic"]
    posterior_threshold: float
    posterior_alpha: float
    synthetic_acceptance_rate: float
    item_tokens: int
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_target_modules: Sequence[str] | str
    count_expert_tokens: bool
    deterministic: bool
    tune: bool | None
    tune_all: bool
    dump: Path | None
    jobs: int
    kv_cache_memory_bytes: int | str | None
    gpu_memory_utilization: float
    snapshot_memory_bytes: int | str | None
    kv_offloading_size: int | float | str | None
    kv_offloading_policy: Literal["lru", "arc"]
    kv_offloading_disk: str | Path | None
    kv_offloading_disk_size: int | str | None
    kv_transfer_config: dict[str, Any] | str | None
    enable_prefix_caching: bool
    token_vector_memory_bytes: int | str
    scheduling_policy: Literal["fcfs", "priority"]
    max_num_queued_reqs: int | None
    long_prefill_token_threshold: int
    scheduler_cls: str | type | None
    cache_secret: str | None
    kv_events_config: dict[str, Any] | str | None
    snapshot_interval: int
    draft_proposer: str | type | None
    speculative_disable_by_batch_size: int | None
    ngram_proposer_max: int
    ngram_proposer_min: int
    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
    max_cpu_loras: int | None
    data_parallel_size: int
    data_parallel_rank: int | None
    eplb_window_size: int
    eplb_step_interval: int
    eplb_log_balancedness: bool
    pipeline_parallel_size: int
    distributed_executor_backend: Literal["uni", "mp", "ray"] | None
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    disable_log_stats: bool
    otlp_traces_endpoint: str | None
    enable_sleep_mode: bool
    requests_while_asleep: Literal["wait", "refuse"]

class EngineArgs:
    __dataclass_fields__: ClassVar[dict[str, Any]]
    model: str | Path | None
    speculative_model: str | Path | None
    speculative_method: Literal["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash"] | None
    skip_tokenizer_init: bool
    seed: int | None
    logits_processors: Sequence[str | Callable[..., Any]]
    structured_outputs_backend: Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"]
    revision: str | None
    download_dir: str | Path | None
    hf_token: str | bool | None
    hf_config_path: str | Path | None
    hf_overrides: dict[str, Any] | None
    model_impl: Literal["auto", "graphllm", "transformers"]
    pooling_type: Literal["LAST", "CLS", "MEAN", "ALL"] | None
    runner: Literal["auto", "generate", "pooling"]
    convert: Literal["auto", "none", "embed", "classify"]
    tokenizer: str | Path | None
    tokenizer_revision: str | None
    generation_config: str | Path
    override_generation_config: dict[str, Any] | None
    artifact: str | Path
    optimize: Literal["behind", "next_start", "first"] | None
    load_format: Literal["auto", "safetensors", "pt", "dummy"]
    threads: int | None
    cpu_offload_gb: float
    target: Literal["auto", "cpu", "cuda"]
    backend: Literal["inductor", "prebuilt", "eager"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    quantization: str | None
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8"]
    mamba_ssm_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"]
    snapshot_dtype: Literal["auto", "int8"]
    quantization_rules: tuple[str, ...]
    buckets: tuple[Bucket, ...] | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int | None
    max_logprobs: int
    max_logit_bias: int
    tensor_parallel_size: int
    enable_expert_parallel: bool
    data_parallel_experts: int | None
    enable_eplb: bool
    num_redundant_experts: int
    num_speculative_tokens: int
    dynamic_speculative_tokens: bool
    speculative_token_tree: str | None
    prompt_lookup_max: int
    prompt_lookup_min: int
    draft_sample_method: Literal["greedy", "probabilistic"]
    rejection_sample_method: Literal["standard", "typical", "synthetic"]
    posterior_threshold: float
    posterior_alpha: float
    synthetic_acceptance_rate: float
    item_tokens: int
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_target_modules: tuple[str, ...]
    count_expert_tokens: bool
    deterministic: bool
    tune: bool | None
    tune_all: bool
    dump: Path | None
    jobs: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    snapshot_memory_bytes: int | None
    kv_offloading_size: int | float | None
    kv_offloading_policy: Literal["lru", "arc"]
    kv_offloading_disk: str | Path | None
    kv_offloading_disk_size: int | None
    kv_transfer_config: dict[str, Any] | None
    enable_prefix_caching: bool
    token_vector_memory_bytes: int
    scheduling_policy: Literal["fcfs", "priority"]
    max_num_queued_reqs: int | None
    long_prefill_token_threshold: int
    scheduler_cls: str | type | None
    cache_secret: str | None
    kv_events_config: dict[str, Any] | None
    snapshot_interval: int
    draft_proposer: str | type | None
    speculative_disable_by_batch_size: int | None
    ngram_proposer_max: int
    ngram_proposer_min: int
    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
    max_cpu_loras: int | None
    data_parallel_size: int
    data_parallel_rank: int | None
    eplb_window_size: int
    eplb_step_interval: int
    eplb_log_balancedness: bool
    pipeline_parallel_size: int
    distributed_executor_backend: Literal["uni", "mp", "ray"] | None
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    disable_log_stats: bool
    otlp_traces_endpoint: str | None
    enable_sleep_mode: bool
    requests_while_asleep: Literal["wait", "refuse"]
    def __init__(self, model: str | Path | None = ..., **settings: Unpack[EngineSettings]) -> None: ...
    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser: ...
    @classmethod
    def from_cli_args(cls, args: Namespace) -> EngineArgs: ...

def args_class(config: type, name: str = "EngineArgs") -> type: ...
