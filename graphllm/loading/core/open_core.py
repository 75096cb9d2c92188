"""The core of a model for whoever drives it step by step: in this process, or several in theirs."""

from __future__ import annotations

from collections.abc import Callable

from graphllm.engine.requests.processor import GrammarChecker
from graphllm.engine.requests.request import Core
from graphllm.loading.artifact.model import ResolvedModel, grammar_maker
from graphllm.loading.core.load import load_core


def open_core(
    resolved: ResolvedModel, phases: Callable[[str, float], None] = lambda name, seconds: None
) -> tuple[Core, GrammarChecker | None]:
    """The core, and what checks constraints. phases: is called with the name and the
    seconds of each start-up phase. Raises ConfigError."""
    if resolved.config.parallel.cores == 1:
        core = load_core(resolved.config, phases, resolved.processors)
        return core, core.grammars if resolved.tokenizer else None
    from graphllm.loading.core.replicated_core import ReplicatedCore  # and with it what speaks to processes

    replicated = ReplicatedCore(resolved, phases)
    make = grammar_maker(resolved)
    return replicated, make(replicated.info) if make else None
