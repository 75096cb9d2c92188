"""Whether a grammar compiles within limits of time and memory, found out in a process of its own.

The library knows no limit for some schemas (20 s and 4 GB for 1 KiB of them), and what it compiles cannot leave its
process. So what is not certainly cheap is compiled there first, and again here once it is known what that takes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import StructuredOutputsParams
from graphllm.engine.process.limited_process import LimitedProcess

CPU_SECONDS = 3
MEMORY_MB = 512
_KEPT = 1024  # answers


class Setup(msgspec.Struct):
    """First line to the process; the others are StructuredOutputsParams."""

    backend: str
    folder: str
    vocab: int
    stop_ids: list[int]


class GrammarTrial:
    """Asks the process, which starts with the first grammar and stays. For several threads. backend: what compiles."""

    def __init__(self, backend: str, tokenizer_folder: Path, vocab: int, stop_ids: frozenset[int]) -> None:
        setup = msgspec.json.encode(Setup(backend, str(tokenizer_folder), vocab, sorted(stop_ids)))
        self._process = LimitedProcess("graphllm.engine.structured.grammar_worker", setup, "large grammars", _KEPT)

    def check(self, field: str, spec: StructuredOutputsParams) -> None:
        """Raises ConfigError for what does not compile within the limits, QueueFullError when too many wait."""
        answer = self._process.ask(msgspec.json.encode(spec))
        if not isinstance(answer, bytes):
            what = f"{CPU_SECONDS} s" if answer in (-signal.SIGXCPU, -signal.SIGKILL) else f"{MEMORY_MB} MiB"
            raise ConfigError(f"structured_outputs.{field}: takes more than {what} to compile; give a simpler one")
        if wrong := msgspec.json.decode(answer, type=str):
            raise ConfigError(wrong)
