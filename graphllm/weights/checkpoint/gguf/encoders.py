"""GGUF's architectures of encoders, as `graphllm.weights.checkpoint.gguf.decoders` has the decoders."""

from __future__ import annotations

from graphllm.weights.checkpoint.gguf.family import Family

ENCODERS: dict[str, tuple[Family, ...]] = {}
