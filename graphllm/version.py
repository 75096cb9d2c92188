"""The version of graphllm; part of every artifact key."""

__version__ = "0.1.0"
