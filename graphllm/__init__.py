"""graphllm: an LLM inference engine whose compiler is the engine. Importing this package imports nothing heavy: each
public name is imported when it is first used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphllm.engine.async_llm import AsyncLLM
    from graphllm.engine.llm import LLM
    from graphllm.engine.load import EngineArgs
    from graphllm.engine.outputs import CompletionOutput, RequestOutput
    from graphllm.engine.params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
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
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "EngineArgs": "load",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"graphllm.engine.{_MODULES.get(name, 'params')}"), name)
    globals()[name] = found
    return found
