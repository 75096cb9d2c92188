"""The process of `graphllm.engine.structured.grammar_trial`: compiles one grammar a line of stdin, within its limits,
and writes what is wrong with it. Beyond the limits it ends. It lives for as long as its stdin does."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import msgspec

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import StructuredOutputsParams
from graphllm.engine.process.limited_process import limit_memory, limit_time
from graphllm.engine.structured.compiler import STACK_BYTES
from graphllm.engine.structured.compilers import GrammarCompilers
from graphllm.engine.structured.grammar_trial import CPU_SECONDS, MEMORY_MB, Setup


def main() -> None:
    """Until stdin closes."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    compiler = GrammarCompilers(Path(setup.folder), setup.vocab, frozenset(setup.stop_ids), setup.backend)
    with contextlib.suppress(ConfigError):  # it comes again with the first grammar
        compiler.compile(StructuredOutputsParams(regex="a"))  # what is made once is not limited
    limit_memory(STACK_BYTES + (MEMORY_MB << 20))
    _answer("")
    for line in sys.stdin.buffer:
        limit_time(CPU_SECONDS)
        try:
            compiler.compile(msgspec.json.decode(line, type=StructuredOutputsParams))
        except ConfigError as wrong:
            _answer(str(wrong))
        else:
            _answer("")
        compiler.forget()


def _answer(wrong: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(wrong) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
