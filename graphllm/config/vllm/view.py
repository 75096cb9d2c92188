"""`VllmConfig`: the settings of an engine under the names of vLLM's config objects, to be read only."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from graphllm.config.args import EngineArgs
from graphllm.config.engine import (
    CacheConfig,
    FilesConfig,
    LoadConfig,
    LogConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
)
from graphllm.config.errors import ConfigError
from graphllm.config.parallel import ParallelConfig
from graphllm.config.setting import definitions
from graphllm.config.vllm.kv_transfer import KVTransferConfig, read_kv_transfer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


class ConfigView:
    """Values by name. name: of the view."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        vars(self).update(values, _name=name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise ConfigError(
            f"{self._name}.{name} is {value!r:.80}: a config can only be read; give EngineArgs the setting"
        )

    def __getattr__(self, name: str) -> Any:  # of names that are not there
        known = ", ".join(sorted(n for n in vars(self) if not n.startswith("_")))
        raise AttributeError(f"{vars(self).get('_name')}.{name}: not here; there are {known}")

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{n}={v!r}' for n, v in vars(self).items() if not n.startswith('_'))})"


class ModelView(ConfigView):
    """Of the model."""

    @functools.cached_property
    def hf_config(self) -> PretrainedConfig:
        """Its config.json, as transformers shows those of models that it does not know."""
        from transformers import PretrainedConfig

        return PretrainedConfig.from_dict(dict(self._config_json))

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        import torch

        found = getattr(torch, self._dtype)
        assert isinstance(found, torch.dtype)
        return found

    def get_vocab_size(self) -> int:
        """Tokens that there are."""
        return int(self._config_json["vocab_size"])


@dataclass(frozen=True)
class VllmConfig:
    """The settings of one engine.

    engine_args: the settings as they were given; an engine is made of them.
    speculative_config: None without drafts.
    lora_config: None without adapters.
    kv_transfer_config: None where nothing is transferred.
    """

    engine_args: EngineArgs
    model_config: ModelView
    cache_config: ConfigView
    scheduler_config: ConfigView
    parallel_config: ConfigView
    load_config: ConfigView
    device_config: ConfigView
    observability_config: ConfigView
    speculative_config: ConfigView | None
    compilation_config: ConfigView
    lora_config: ConfigView | None = None
    kv_transfer_config: KVTransferConfig | None = None


def vllm_view(
    args: EngineArgs, compiled: Mapping[str, Any], config_json: Mapping[str, Any], name: str, folder: str
) -> VllmConfig:
    """The view of an engine.

    args: as the user gave them.
    compiled: the fields of `CompileConfig` that the engine's programs have.
    config_json: of the model.
    name: of the model, in requests.
    folder: of the model.
    """
    said = vars(args) | dict(compiled)

    def of(*groups: type) -> dict[str, Any]:
        return {name: said[name] for group in groups for name in definitions(group)}

    model = {
        **of(ModelConfig, FilesConfig),
        **{name: said[name] for name in ("max_model_len", "quantization", "max_logprobs")},
        "model": str(args.model or folder),
        "served_model_name": name,
        "enforce_eager": said["backend"] == "eager",
        "runner_type": "generate",
        "trust_remote_code": False,
        "_config_json": config_json,
        "_dtype": said["dtype"],
    }
    cache = of(CacheConfig) | {
        "block_size": said["block_size"],
        "enable_prefix_caching": args.enable_prefix_caching,
        "cache_dtype": said["kv_cache_dtype"],
    }
    scheduler = of(SchedulerConfig) | {
        **{name: said[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")},
        "policy": args.scheduling_policy,
        "enable_chunked_prefill": True,
    }
    size, drafted = said["tensor_parallel_size"], said["num_speculative_tokens"]
    parallel = {**of(ParallelConfig), "tensor_parallel_size": size, "world_size": size * args.pipeline_parallel_size,
                "rank": 0, "data_parallel_rank": 0}  # fmt: skip
    device = said["target"].device
    looked = {name: said[name] for name in ("prompt_lookup_max", "prompt_lookup_min")}
    method = {"method": "ngram", **looked} if looked["prompt_lookup_max"] else {"method": "draft_model"}
    drafts = {**method, "model": args.speculative_model, "num_speculative_tokens": drafted}
    adapters = {**of(LoRAConfig), **{name: said[name] for name in ("max_loras", "max_lora_rank")}}
    return VllmConfig(
        args,
        ModelView("model_config", model),
        ConfigView("cache_config", cache),
        ConfigView("scheduler_config", scheduler),
        ConfigView("parallel_config", parallel),
        ConfigView("load_config", of(LoadConfig)),
        ConfigView("device_config", {"device": device, "device_type": device}),
        ConfigView("observability_config", of(LogConfig)),
        ConfigView("speculative_config", drafts) if drafted else None,
        ConfigView("compilation_config", compiled),
        ConfigView("lora_config", adapters) if said["enable_lora"] else None,
        read_kv_transfer(args.kv_transfer_config),
    )
