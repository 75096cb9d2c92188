"""graphllm: an LLM inference engine whose compiler is the engine. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
