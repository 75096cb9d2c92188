"""vLLM's names of engine options and sampling parameters that there are not here, as data.

Each says what it means, which values are what happens anyway, and what to do about others. One line each; a name that
becomes a setting leaves this table.

A name is one of four: it *means* settings of ours; it is *fixed*, and only its neutral values are accepted; it is a
*hint* about speed or logs that cannot change an answer, accepted with a line in the log where it has no effect; or it
is unknown, which is an error that names the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from graphllm.config.errors import ConfigError
from graphllm.config.parameter import raise_all
from graphllm.config.setting import LEAST_TIER_BYTES

_log = logging.getLogger(__name__)


class ForeignName(NamedTuple):
    """An option of vLLM's that is no setting here.

    neutral: values that change nothing here; None always is one. remedy: why there are no others, and what to do.
    means: makes settings of the value, where it means some. hint: other values are accepted, too. switch: an option
    without a value on the command line.
    """

    neutral: tuple[Any, ...] = ()
    remedy: str = ""
    means: Callable[[Any], Mapping[str, Any]] | None = None
    hint: bool = False
    switch: bool = False


def fixed(remedy: str, **neutral: Any) -> dict[str, ForeignName]:
    """Names with some accepted values: one, or several in a tuple."""
    made = {}
    for name, value in neutral.items():
        values = value if isinstance(value, tuple) else (value,)
        made[name] = ForeignName(values, remedy, switch=any(isinstance(v, bool) for v in values))
    return made


def hints(remedy: str, **neutral: Any) -> dict[str, ForeignName]:
    return {name: entry._replace(hint=True) for name, entry in fixed(remedy, **neutral).items()}


_NGRAM = ("ngram", "ngram_gpu")
_DRAFTING = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash")
_ACCEPTANCE = ("rejection_sample_method", "posterior_threshold", "posterior_alpha", "synthetic_acceptance_rate")
# Methods that guess on the host, and what their keys mean.
_ON_HOST: Mapping[str, Mapping[str, str]] = {
    "suffix": {
        name: name
        for name in (
            "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        )
    },
    "ngram_host": {"prompt_lookup_max": "ngram_proposer_max", "prompt_lookup_min": "ngram_proposer_min"},
    "custom_class": {"model": "draft_proposer"},
}  # fmt: skip


def _speculation(value: Any) -> Mapping[str, Any]:
    """vLLM's speculative_config, of what drafts by a model or of prompt lookup."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config is {value!r:.80}: give an object with method and num_speculative_tokens")
    given = {name: v for name, v in value.items() if v is not None}
    method = given.pop("method", None)
    if isinstance(method, str) and method.endswith("_mtp"):  # vLLM has one for each architecture
        method = "mtp"
    known_methods = (*_DRAFTING, *_NGRAM, *_ON_HOST)
    if method not in (None, *known_methods):
        raise ConfigError(f"speculative_config.method is {method!r:.80}: there are {', '.join(known_methods)}")
    if method is None and "model" not in given:
        raise ConfigError(f"speculative_config is {value!r:.80}: it has neither method nor model; give one of them")
    if given.get("draft_tensor_parallel_size") == 1:
        del given["draft_tensor_parallel_size"]
    known = {"num_speculative_tokens": "num_speculative_tokens"}
    known["disable_by_batch_size"] = "speculative_disable_by_batch_size"
    if method in _ON_HOST:
        known |= {"draft_proposer": "draft_proposer", **_ON_HOST[method]}
        given = {"draft_proposer": method.removesuffix("_host")} | given if method != "custom_class" else given
    elif method not in _NGRAM:
        known |= {name: name for name in ("draft_sample_method", *_ACCEPTANCE)}
        known |= {"model": "speculative_model", "speculative_token_tree": "speculative_token_tree"}
        if isinstance(given.get("speculative_token_tree"), list | tuple | dict):
            given["speculative_token_tree"] = str(given["speculative_token_tree"])
    else:
        known |= {name: name for name in ("prompt_lookup_max", "prompt_lookup_min")}
        one = given.get("prompt_lookup_max", given.get("prompt_lookup_min", 5))
        given = {"prompt_lookup_max": one, "prompt_lookup_min": one} | given
    if wrong := [name for name in given if name not in known]:
        raise ConfigError(
            f"speculative_config.{wrong[0]} is {given[wrong[0]]!r:.80}: with method {method} give "
            f"{', '.join(name for name in known if name != 'draft_proposer')} only"
        )
    means = {ours: given[theirs] for theirs, ours in known.items() if theirs in given}
    return {"speculative_method": method, **means} if method in _DRAFTING else means


_EPLB = {
    "num_redundant_experts": "num_redundant_experts",
    **{name: f"eplb_{name}" for name in ("window_size", "step_interval", "log_balancedness")},
}
# Always so: experts move while serving, by one algorithm, and each look at the load logs a line.
_EPLB_NEUTRAL = {"use_async": (True, False), "policy": ("default",), "log_balancedness_interval": (1,)}


def _balancing(value: Any) -> Mapping[str, Any]:
    """vLLM's eplb_config."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"eplb_config is {value!r:.80}: give an object with {', '.join(_EPLB)}")
    for name, given in value.items():
        if name not in _EPLB and given is not None and given not in _EPLB_NEUTRAL.get(name, ()):
            neutral = _EPLB_NEUTRAL.get(name)
            remedy = f"use {neutral[0]}" if neutral else f"there are {', '.join(_EPLB)}"
            raise ConfigError(f"eplb_config.{name} is {given!r:.80}: {remedy}")
    return {_EPLB[name]: given for name, given in value.items() if name in _EPLB and given is not None}


def _speculation_method(value: Any) -> Mapping[str, Any]:
    return _speculation({"method": value})


def _eager(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, bool):
        raise ConfigError(f"enforce_eager is {value!r:.80}: give True or False")
    return {"backend": "eager"} if value else {}


def _structured_outputs(value: Any) -> Mapping[str, Any]:
    """vLLM's structured_outputs_config. Whitespace and further properties are a request's own choice."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"structured_outputs_config is {value!r:.80}: give an object with backend")
    for name, given in value.items():
        if name != "backend" and given not in (None, "", False):
            known = name in ("disable_any_whitespace", "disable_additional_properties")
            remedy = f"give it in a request's structured_outputs.{name}" if known else "leave it out"
            raise ConfigError(f"structured_outputs_config.{name} is {given!r:.80}: not supported; {remedy}")
    return {"structured_outputs_backend": value["backend"]} if value.get("backend") is not None else {}


_TASKS: Mapping[Any, Mapping[str, Any]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling"},
    "embedding": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling", "convert": "classify"},
}
_POOLER = {"pooling_type": "pooling_type", "seq_pooling_type": "pooling_type"}
_PER_REQUEST = ("normalize", "dimensions", "use_activation", "activation", "softmax", "step_tag_id")


def _task(value: Any) -> Mapping[str, Any]:
    """vLLM's older word for runner and convert."""
    if not isinstance(value, str) or value not in _TASKS:
        raise ConfigError(f"task is {value!r:.80}: give one of {', '.join(_TASKS)}")
    return _TASKS[value]


def _pooler(value: Any) -> Mapping[str, Any]:
    """vLLM's pooler_config."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"pooler_config is {value!r:.80}: give an object with pooling_type")
    for name, given in value.items():
        if name not in _POOLER and given is not None:
            how = "give it in PoolingParams" if name in _PER_REQUEST else "leave it out"
            raise ConfigError(f"pooler_config.{name} is {given!r:.80}: not supported here; {how}")
    return {_POOLER[name]: given for name, given in value.items() if given is not None}


def _renamed(setting: str) -> ForeignName:
    return ForeignName(means=lambda value: {setting: value})


def _gibibytes(value: Any) -> Any:
    """Bytes of a number without a unit: of gibibytes, as in vLLM, where it is too small for bytes. Another value stays
    as it is. What is read twice must not change: fewer bytes than that are a ConfigError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    if isinstance(value, bool) or not 0 <= number < 2**63:
        return value
    found = int(number * 2**30) if number < LEAST_TIER_BYTES else int(number)
    if number and found < LEAST_TIER_BYTES:
        raise ConfigError(
            f"kv_offloading_size is {value!r:.80}: a number without a unit is GiB, and this is less than a megabyte; "
            "give more, such as 1GiB"
        )
    return found


def _swap_space(value: Any) -> Mapping[str, Any]:
    """vLLM's older word for kv_offloading_size."""
    found = _gibibytes(0 if value is None else value)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ConfigError(f"swap_space is {value!r:.80}: give a number of GiB, or kv_offloading_size in place of it")
    return {"kv_offloading_size": found} if found else {}


_MEANINGS = {
    "task": ForeignName(means=_task, remedy="`runner` and `convert`"),
    **dict.fromkeys(("pooler_config", "override_pooler_config"), ForeignName(means=_pooler, remedy="`pooling_type`")),
    "enforce_eager": ForeignName(means=_eager, switch=True, remedy="`backend`: True is `eager`, False the default"),
    "device": _renamed("target")._replace(remedy="`target`"),
    "device_memory_utilization": _renamed("gpu_memory_utilization")._replace(remedy="`gpu_memory_utilization`"),
    "spec_model": _renamed("speculative_model")._replace(remedy="`speculative_model`"),
    "spec_tokens": _renamed("num_speculative_tokens")._replace(remedy="`num_speculative_tokens`"),
    "structured_outputs_config": ForeignName(
        means=_structured_outputs, remedy="`structured_outputs_backend`, of an object with `backend`"
    ),
    "guided_decoding_backend": _renamed("structured_outputs_backend")._replace(remedy="`structured_outputs_backend`"),
    "swap_space": ForeignName(means=_swap_space, remedy="`kv_offloading_size`"),
    "num_lookahead_slots": _renamed("num_speculative_tokens")._replace(remedy="`num_speculative_tokens`"),
    "speculative_config": ForeignName(
        means=_speculation,
        remedy="`speculative_method` and `speculative_model` or, with method ngram, `prompt_lookup_max` and "
        "`prompt_lookup_min`, and `num_speculative_tokens`",
    ),
    "eplb_config": ForeignName(
        means=_balancing,
        remedy="`num_redundant_experts`, `eplb_window_size`, `eplb_step_interval`, `eplb_log_balancedness`",
    ),
    "spec_method": ForeignName(
        means=_speculation_method, remedy="`speculative_method`, or `prompt_lookup_max` for ngram"
    ),
}

_DEGREES = "what is divided is said by tensor_parallel_size and pipeline_parallel_size; leave it out"
_TEXT = "models here read text only; leave it out"
_LORA = (
    "adapters change linear layers of the text model, in its dtype; leave it out, or merge the adapter (graphllm merge)"
)
_CACHE = "the cache lies on the device, all of it in kv_cache_dtype, in kv_cache_memory_bytes; leave it out"
_WATERMARK = "answers carry no watermark; leave it out"
_TRANSFER = "only blocks of the cache move between engines, see kv_transfer_config; leave it out"
_SLEEP = "a sleep of level 2 drops all weights, and waking up reads them again; leave it out, or sleep at level 1"
_COMPILED = "all is compiled ahead of time, with kernels that are chosen then; see buckets and tune in docs/settings.md"
_HOST = "this engine's host works in another way, and has nothing to choose there"
_LOGS = "it changes what is logged or measured there, not an answer"
_STATES = "recurrent states are kept in the model's own way; leave it out"
_OWN_CODE = "the engine's parts are its own; leave it out (docs/architecture.md has what can be added)"

VLLM_NAMES: Mapping[str, ForeignName] = {
    **_MEANINGS,
    # Where the model comes from. What is not here is a setting.
    **fixed("configs are Hugging Face's config.json; use auto", config_format=("auto", "hf")),
    **fixed("of a repository only configs, tokenizer and weights are downloaded; leave it out",
             ignore_patterns=([], ["original/**/*"], "original/**/*")),
    **fixed("files are read in one way only; leave it out", model_loader_extra_config=({},)),
    **hints("no code of a checkpoint ever runs; what needs it is refused by name", trust_remote_code=False,
             code_revision="main"),
    **fixed("the tokenizer is the checkpoint's own, read by the tokenizers library; use auto",
             tokenizer_mode=("auto", "hf")),
    **fixed("docs/adding-a-model.md has the models; leave it out", model_class_overrides=({},)),
    **fixed('give hf_overrides={"rope_scaling": ...}, with rope_theta there, too', rope_scaling=({},), rope_theta=()),
    **fixed(_OWN_CODE, worker_cls="auto", additional_config=({},), io_processor_plugin=()),
    **fixed("LLM.collective_rpc takes functions of a module; leave it out", worker_extension_cls=""),
    **fixed(
        "quantization here takes int8 and int4; leave it out", quantization_config=({},),
        allow_deprecated_quantization=False, quantization_param_path=(),
    ),
    # Several devices.
    **fixed(
        _DEGREES, decode_context_parallel_size=1,
        prefill_context_parallel_size=1, device_ids=(), worker_use_ray=False,
        enable_elastic_ep=False, elastic_ep_max_dp_size=(), enable_fault_tolerance=False,
        fault_tolerance_config=({},), fully_sharded_loras=False, enable_dbo=False, enable_batch_sharded_sampling=False,
        enable_hc_sp=False, enable_ep_weight_filter=False,
    ),
    **fixed(
        "all engine cores are on this machine; give data_parallel_size, and for one of them data_parallel_rank",
        data_parallel_size_local=1, data_parallel_start_rank=0, data_parallel_external_lb=False,
        data_parallel_hybrid_lb=False,
    ),
    **fixed("it is a flag of `graphllm serve`", data_parallel_multi_port_external_lb=False),
    **hints(
        "it changes nothing in how ranks work here", data_parallel_address=(), data_parallel_backend="mp",
        data_parallel_rpc_port=(), disable_custom_all_reduce=False,
        all2all_backend=(), expert_placement_strategy="linear", max_parallel_loading_workers=(),
        ray_workers_use_nsight=False, distributed_timeout_seconds=(), cpu_distributed_timeout_seconds=(),
        cp_kv_cache_interleave_size=1, dcp_kv_cache_interleave_size=1, dcp_comm_backend=(), dcp_q_replicate=False,
        dbo_decode_token_threshold=32, dbo_prefill_token_threshold=512, ubatch_size=0, dp_sync_interval=(),
        disable_nccl_for_dp_synchronization=False, enable_nccl_comm_suspend=False,
    ),
    # Images, sound, other inputs.
    **fixed(
        _TEXT, allowed_local_media_path="", allowed_media_domains=((), []), media_io_kwargs=({},),
        limit_mm_per_prompt=({},), mm_processor_kwargs=({},), interleave_mm_strings=False, enable_mm_embeds=False,
        enable_prompt_embeds=False, mm_encoder_only=False, default_mm_loras=({},), mm_encoder_attn_dtype=(),
        mm_encoder_fp8_scale_path=(), mm_encoder_fp8_scale_save_path=(), diffusion_config=(), engram_config=(),
        video_pruning_rate=(0, 0.0), video_pruning_method=(),
    ),
    **hints(
        "models here read text only, where it has no effect", language_model_only=False, skip_mm_profiling=False,
        mm_processor_cache_gb=4, mm_processor_cache_type="lru", mm_shm_cache_max_object_size_mb=128,
        mm_encoder_tp_mode="weights", mm_encoder_attn_backend=(), mm_hasher_algorithm="blake3", mm_tensor_ipc=(),
        mm_ipc_gpu_memory_gb=(), mm_processor_device=(), mm_device_do_normalize=False,
        mm_encoder_fp8_scale_save_margin=(), disable_mm_preprocessor_cache=False,
        disable_chunked_mm_input=False, renderer_num_workers=1,
        enable_shm_tensor_arena=False,
    ),
    # Kinds of models and of answers.
    **fixed(
        _LORA, enable_lora_bias=False, enable_tower_connector_lora=False, enable_mixed_moe_lora_format=False,
        enable_moe_shared_loras=False, lora_dtype="auto",
    ),
    **hints(
        "adapters have no tokens or labels of their own, and steps without one run programs without them",
        lora_extra_vocab_size=256, max_lora_cls_labels=(), specialize_active_lora=False,
    ),
    **fixed(_WATERMARK, watermark=(False,), watermark_config=({},)),
    **fixed(
        "log-probabilities are the model's own, before temperature and penalties; use raw_logprobs",
        logprobs_mode="raw_logprobs",
    ),
    **fixed("answers do not have it; leave it out", enable_return_routed_experts=False, return_sampling_mask=False,
             aux_output_config=({},), enable_trace_replay=False),
    **fixed("reasoning ends where the model ends it; leave it out", reasoning_config=({},)),
    **hints("only `graphllm serve` takes reasoning out of answers", reasoning_parser=("", "auto"),
             reasoning_parser_plugin=""),
    **hints("random draws are this engine's own", use_fp64_gumbel=False),
    # The cache and the memory.
    **fixed(
        _CACHE, calculate_kv_scales=False, kv_cache_dtype_skip_layers=((), []),
        kv_sharing_fast_prefill=False, num_gpu_blocks_override=(),
        prefix_cache_retention_interval=(), swa_bounded_replay=False,
    ),
    **fixed("copies lie in host memory and on disk; use native, with kv_offloading_size and kv_offloading_disk",
             kv_offloading_backend="native"),
    **hints("a request is computed again, or copied back from kv_offloading_size where that is faster",
             preemption_mode=("recompute", "swap")),
    **hints("windows of attention are the model's own, and their blocks are freed", disable_sliding_window=False,
             disable_hybrid_kv_cache_manager=False, use_v2_block_manager=True),
    **hints("SHA-256 identifies blocks", prefix_caching_hash_algo="sha256", prefix_match_unit=()),
    **fixed(
        "cpu_offload_gb says how many weights stay on the host, and which ones follows from it; leave it out",
        cpu_offload_params=((), []), offload_backend="auto", offload_group_size=0, offload_params=((), []),
    ),
    **hints("cpu_offload_gb copies one group of weights ahead", offload_num_in_group=1, offload_prefetch_step=1),
    **fixed(_TRANSFER, ec_transfer_config=({},), ec_manager_config=({},), weight_transfer_config=({},)),
    **fixed(_SLEEP, sleep_preserve_parameter_names=((), [])),
    **hints("memory is given back under addresses that stay, so captured graphs stay valid", sleep_mode_backend=(),
             sleep_mode_offload_cudagraph=False, enable_cumem_allocator=False),
    **fixed(
        _STATES, mamba_cache_dtype="auto", mamba_cache_mode=("none", "align", "all"),
        enable_mamba_cache_stochastic_rounding=False, mamba_block_size=(), use_replayssm=False,
    ),
    **hints(
        "recurrent states are computed in this engine's own way", mamba_backend=(), mamba_cache_philox_rounds=(),
        mamba_ssu_algorithm=(), enable_mamba_shared_prefix_checkpoint=False, replayssm_buffer_len=(),
        gdn_prefill_backend=(), kda_decode_backend=(), kda_prefill_backend=(),
    ),
    # Steps.
    **fixed(
        "long prompts are always computed in chunks, together with requests that decode; leave it out, or raise "
        "max_num_batched_tokens", enable_chunked_prefill=True,
    ),
    **fixed("requests wait in one queue; use max_num_queued_reqs", max_num_queued_tokens=(), max_num_active_seqs=()),
    **hints(
        _HOST, async_scheduling=True, num_scheduler_steps=1, multi_step_stream_outputs=True,
        max_num_partial_prefills=1, max_long_partial_prefills=1, max_num_scheduled_tokens=(), stream_interval=1,
        prefill_schedule_interval=(), scheduler_reserve_full_isl=True, long_prefill_token_threshold_adaptive=False,
        disable_async_output_proc=False, disable_cascade_attn=False, performance_mode="balanced",
    ),
    # What is compiled.
    **hints(
        _COMPILED, compilation_config=({},), optimization_level=2, cudagraph_capture_sizes=(),
        max_cudagraph_capture_size=(), cuda_graph_sizes=(), max_seq_len_to_capture=8192,
        max_context_len_to_capture=8192, attention_backend="auto", attention_config=({},), kernel_config=({},),
        moe_backend="auto", linear_backend="auto", sparse_indexer_topk_backend=(), monokernel=(),
        enable_flashinfer_autotune=True, ir_op_priority=({},), jit_monitor_mode=(), jit_monitor_verbose=False,
    ),
    # Loading.
    **hints(
        "files are read as fast as they come", safetensors_load_strategy="lazy", safetensors_prefetch_block_size=(),
        safetensors_prefetch_num_threads=(), pt_load_map_location="cpu", use_tqdm_on_load=True,
    ),
    **hints("processes are placed by the system", numa_bind=False, numa_bind_cpus=(), numa_bind_nodes=()),
    # Logs and measurements.
    **hints(
        _LOGS, aggregate_engine_logging=False, collect_detailed_traces=(), cudagraph_metrics=False,
        custom_histogram_buckets=(), enable_layerwise_nvtx_tracing=False, enable_log_requests=False,
        disable_log_requests=True, enable_logging_iteration_details=False, enable_mfu_metrics=False,
        fail_on_environ_validation=False, kv_cache_metrics=False, kv_cache_metrics_sample=0.01, log_config_file=(),
        log_level=(), logging_config=(), per_request_spec_decode_metrics=False, profiler_config=({},),
        show_hidden_metrics_for_version=(), watchdog_config=({},),
    ),
    **hints("only `graphllm serve` has names in requests and an end in good order", served_model_name=(),
             shutdown_timeout=()),
}  # fmt: skip

# The same for fields of SamplingParams and of requests.
SAMPLING_NAMES: Mapping[str, ForeignName] = {
    "guided_decoding": _renamed("structured_outputs")._replace(remedy="`structured_outputs`"),
    **fixed("a request gets the completions that it asks for; use n", best_of=1),
    **fixed("log-probabilities come as lists of dicts; leave it out", flat_logprobs=False),
    **fixed("use LLM.beam_search", use_beam_search=False, length_penalty=1, early_stopping=False),
    **fixed("processors belong to the engine; use LLM(logits_processors=...) and extra_args",
             logits_processors=([], ())),
    **fixed("log-probabilities are of the likeliest tokens; use logprobs", prompt_logprob_token_ids=()),
    **fixed("prompt_logprobs are of the whole prompt; leave it out", prompt_logprob_start=0),
    **fixed("models here have no routed experts to report; leave it out", routed_experts_prompt_start=0),
    **fixed("answers come as they are made; leave it out", stream_interval=1, output_text_buffer_length=0),
    **fixed("tokens are chosen by the model; leave it out", trace_decode_token_ids=()),
    **fixed("a prompt that is too long is refused; shorten it", truncate_prompt_tokens=()),
    **fixed(_WATERMARK, watermarking=False),
    **fixed("parameters never change; leave it out", skip_clone=(False, True)),
}  # fmt: skip

# Other words for values that settings have.
_DTYPES = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}
SPELLINGS: Mapping[str, Mapping[Any, Any]] = {
    "dtype": _DTYPES,
    "kv_cache_dtype": {"fp8_e4m3": "fp8", **_DTYPES},
    "mamba_ssm_cache_dtype": _DTYPES,
    "model_impl": {"vllm": "graphllm"},
    "max_model_len": {-1: None, "-1": None, "auto": None},
    "logits_processors": {None: ()},
    "generation_config": {None: "auto"},
    "enable_prefix_caching": {None: True},
    "kv_offloading_policy": {None: "lru"},
    "reasoning_parser": {"deepseek_r1": "think", "qwen3": "think", "": "auto"},
    "tool_call_parser": {"llama3_json": "llama3", "llama4_json": "llama3", "": "auto"},
    "uvicorn_log_level": {"trace": "debug", "critical": "error"},
}

SHORT = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size", "-q": "quantization",
    "-cc": "compilation_config", "-sc": "speculative_config", "-ac": "attention_config", "-O": "optimization_level",
}  # fmt: skip


def _fields(value: Any) -> Any:
    """The fields of a dataclass, such as vLLM's own config; another value stays as it is."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


# Values that are given in another form to vLLM, or mean something else there.
_FORMS: Mapping[str, Callable[[Any], Any]] = {"kv_offloading_size": _gibibytes, "kv_transfer_config": _fields}


def spelled(name: str, value: Any) -> Any:
    """The word for a value that the setting has."""
    if name in _FORMS:
        return _FORMS[name](value)
    words = SPELLINGS.get(name, {})
    return words.get(value, value) if isinstance(value, str | int | None) and not isinstance(value, bool) else value


def as_settings(
    given: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, ForeignName] = VLLM_NAMES
) -> dict[str, Any]:
    """What a user of vLLM's names has said, as settings. defaults: of all settings, by name. names: which others are
    known. Raises ConfigError naming all that cannot be, and the nearest name for one that nobody knows."""
    found = {name: spelled(name, value) for name, value in given.items() if name in defaults}
    problems = []
    for name, value in given.items():
        if name in defaults or (value is None and name in names):
            continue
        try:
            for setting, meant in _meaning(name, value, names, defaults).items():
                if found.get(setting, defaults[setting]) not in (defaults[setting], meant):
                    raise ConfigError(
                        f"{name} is {value!r:.80}: that is {setting}={meant!r:.80}, which is given as "
                        f"{found[setting]!r:.80}; leave one of them out"
                    )
                found[setting] = meant
        except ConfigError as problem:
            problems.append(str(problem))
    raise_all(problems)
    return found


def _meaning(name: str, value: Any, names: Mapping[str, ForeignName], settings: Collection[str]) -> Mapping[str, Any]:
    if name not in names:
        near = difflib.get_close_matches(name, settings, 1) or difflib.get_close_matches(name, names, 1)
        also = f", or did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name!s:.80} is {value!r:.80}: not supported; leave it out{also}")
    entry = names[name]
    if entry.means is not None:
        return entry.means(value)
    if not any(_same(value, neutral) for neutral in entry.neutral):
        if not entry.hint:
            raise ConfigError(f"{name} is {value!r:.80}: {entry.remedy}")
        _log.warning("%s is %.80r: no effect here; %s", name, value, entry.remedy)
    return {}


def read_text(text: str) -> Any:
    """A value of one of these names, as it stands on a command line."""
    try:
        return json.loads(text)
    except ValueError:
        return {"None": None, "True": True, "False": False}.get(text, text)


def _same(value: Any, neutral: Any) -> bool:
    """1 is not True."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
