"""Every setting of graphllm, defined once: type, default, help, command-line option, and whether it is in the artifact
key. Imports nothing heavy and keeps no state."""

from graphllm.config.args import EngineArgs
from graphllm.config.compilation import (
    Bucket,
    CompileConfig,
    Quantization,
    Target,
    check,
    default_buckets,
    parse_buckets,
)
from graphllm.config.engine import (
    CacheConfig,
    CoreConfig,
    EngineConfig,
    FilesConfig,
    LoadConfig,
    LogConfig,
    LoRAConfig,
    ModelConfig,
    Peers,
    SchedulerConfig,
    SleepConfig,
    TierConfig,
)
from graphllm.config.env import Env
from graphllm.config.errors import ConfigError
from graphllm.config.parallel import ParallelConfig
from graphllm.config.setting import Setting, definitions, key_fields, parse_bytes, setting
from graphllm.config.speculation import SpeculationConfig

__all__ = [
    "Bucket",
    "CacheConfig",
    "CompileConfig",
    "ConfigError",
    "CoreConfig",
    "EngineArgs",
    "EngineConfig",
    "Env",
    "FilesConfig",
    "LoRAConfig",
    "LoadConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "Peers",
    "Quantization",
    "SchedulerConfig",
    "Setting",
    "SleepConfig",
    "SpeculationConfig",
    "Target",
    "TierConfig",
    "check",
    "default_buckets",
    "definitions",
    "key_fields",
    "parse_buckets",
    "parse_bytes",
    "setting",
]
