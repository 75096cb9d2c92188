"""graphllm: an LLM inference engine whose compiler is the engine. Importing this package imports nothing heavy: each
public name is imported when it is first used."""

import importlib
from typing import TYPE_CHECKING

from graphllm.version import __version__ as __version__

if TYPE_CHECKING:
    from graphllm.config import EngineArgs
    from graphllm.config.sampling import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
    from graphllm.engine.outputs import CompletionOutput, RequestOutput
    from graphllm.entrypoints.async_llm import AsyncLLM
    from graphllm.entrypoints.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "entrypoints.llm",
    "AsyncLLM": "entrypoints.async_llm",
    "EngineArgs": "config",
    "CompletionOutput": "engine.outputs",
    "RequestOutput": "engine.outputs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"graphllm.{_MODULES.get(name, 'config.sampling')}"), name)
    globals()[name] = found
    return found
