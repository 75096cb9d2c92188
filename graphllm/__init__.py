"""graphllm: an LLM inference engine whose compiler is the engine. Importing this package imports nothing heavy: each
public name is imported when it is first used."""

import importlib
from typing import TYPE_CHECKING

from graphllm.host.environment import set_environment
from graphllm.version import __version__ as __version__

if TYPE_CHECKING:
    from graphllm.config.requests.pooling_params import PoolingParams
    from graphllm.config.requests.sampling_params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from graphllm.config.requests.sampling_params import StructuredOutputsParams as GuidedDecodingParams
    from graphllm.config.vllm.parser import FlexibleArgumentParser
    from graphllm.config.vllm.view import VllmConfig
    from graphllm.engine.requests.logits_processors import (
        AdapterLogitsProcessor,
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
    )
    from graphllm.engine.requests.outputs import CompletionOutput, RequestOutput
    from graphllm.engine.requests.processor import Prompt as PromptType
    from graphllm.engine.requests.processor import TextPrompt, TokensPrompt
    from graphllm.engine.vectors.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from graphllm.entrypoints.adapters import LoRARequest
    from graphllm.entrypoints.async_llm import AsyncLLM
    from graphllm.entrypoints.async_llm import AsyncLLM as AsyncLLMEngine
    from graphllm.entrypoints.llm import LLM
    from graphllm.entrypoints.llm_engine import LLMEngine
    from graphllm.entrypoints.metrics_reader import Counter, Gauge, Histogram, Metric, Vector
    from graphllm.entrypoints.vllm_config import EngineArgs
    from graphllm.entrypoints.vllm_config import EngineArgs as AsyncEngineArgs

set_environment()

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "GuidedDecodingParams",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Metric",
    "MoveDirectionality",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "VllmConfig",
]

# Where each name is, and what it is called there where that is another name.
_PLACES = {
    "LLM": "entrypoints.llm",
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), "entrypoints.metrics_reader"),
    **dict.fromkeys(
        ("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
        "engine.requests.logits_processors",
    ),
    "LLMEngine": "entrypoints.llm_engine",
    "LoRARequest": "entrypoints.adapters",
    "AsyncLLM": "entrypoints.async_llm",
    "AsyncLLMEngine": "entrypoints.async_llm:AsyncLLM",
    "EngineArgs": "entrypoints.vllm_config",
    "VllmConfig": "config.vllm.view",
    "AsyncEngineArgs": "entrypoints.vllm_config:EngineArgs",
    "FlexibleArgumentParser": "config.vllm.parser",
    "CompletionOutput": "engine.requests.outputs",
    "RequestOutput": "engine.requests.outputs",
    "PoolingParams": "config.requests.pooling_params",
    **dict.fromkeys(
        [
            *("ClassificationOutput", "ClassificationRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"),
            *("PoolingOutput", "PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
        ],
        "engine.vectors.pooling_outputs",
    ),
    "GuidedDecodingParams": "config.requests.sampling_params:StructuredOutputsParams",
    "PromptType": "engine.requests.processor:Prompt",
    "TextPrompt": "engine.requests.processor",
    "TokensPrompt": "engine.requests.processor",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, own = _PLACES.get(name, "config.requests.sampling_params").partition(":")
    found = getattr(importlib.import_module(f"graphllm.{module}"), own or name)
    globals()[name] = found
    return found
