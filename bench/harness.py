"""What all cases share: settings, rows, processes of their own, turns, and the proof that the work is real.

A case is a file of bench/cases with a literal ``CASES``, a list of (name, settings), and ``run(case)``. ``run`` returns
the figures, or yields them part by part, as nested mappings; `rows_of` makes rows of them. This file imports no
heavy library, because cases measure the start and the memory of processes that import it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
CPUS = len(os.sched_getaffinity(0))
GRAPHLLM = (sys.executable, "-m", "graphllm.cli")
Rows = dict[str, dict[str, Any]]
VOID = "void"  # the last word of a row that says why the other rows do not count


class Case(argparse.Namespace):
    """One case as it runs. Its settings are its attributes.

    case: its name in the list ``CASES``
    settings: names of the settings
    """

    def __init__(self, case: str, settings: Mapping[str, Any]) -> None:
        super().__init__(**settings)
        self.case, self.settings = case, tuple(settings)

    @property
    def device(self) -> str:
        """ "cuda" or "cpu", by the setting ``target``."""
        return str(getattr(self, "target", "cpu"))


def rows_of(figures: Mapping[str, Any], name: str = "") -> Rows:
    """Rows of nested figures: each mapping's numbers, words and lists are a row, named by the keys that lead to it.

    A list of mappings gives a row for each, with its number in the name.
    """
    own: dict[str, Any] = {}
    found: Rows = {}
    for key, value in figures.items():
        place = f"{name}, {key}" if name else str(key)
        if isinstance(value, Mapping):
            found |= rows_of(value, place)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) for v in value):
            for number, one in enumerate(value, 1):
                found |= rows_of(one, f"{place}, {number}")
        else:
            own[str(key)] = value
    return ({name or "all": own} if own else {}) | found


def in_process(function: Callable[..., Any], *arguments: Any, env: Mapping[str, str] | None = None) -> Any:
    """The result of a module's function in a fresh Python process. What it prints goes to stderr.

    arguments: anything that JSON knows, and paths, which arrive as strings
    env: variables in addition to this process's own

    Returns {"failed": status} when the process fails; its error is on stderr.
    """
    command = worker_command("call", function, *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=worker_environment(env))
    return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.returncode}


def worker_command(how: Literal["call", "serve"], function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command line of bench/worker.py for a function."""
    given = json.dumps(arguments, default=str)
    return [sys.executable, "-m", "bench.worker", how, function.__module__, function.__name__, given]


def worker_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with this tree on the path of modules."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(more or {})}


def in_turn(
    rounds: int,
    systems: Iterable[str],
    measure: Callable[[str], float],
    *,
    warm: int = 0,
    order: Literal["as listed", "mirrored", "random"] = "as listed",
) -> dict[str, list[float]]:
    """The figures of each system, one a round. In every round the systems run one after the other.

    warm: rounds before the first that counts
    order: "mirrored" reverses every second round
    """
    names = list(systems)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + warm):
        turn = random.sample(names, len(names)) if order == "random" else names
        for name in reversed(turn) if order == "mirrored" and number % 2 == 0 else turn:
            value = measure(name)
            if number >= warm:
                found[name].append(value)
    return found


def check_tokens(outputs: Iterable[Sequence[int]]) -> None:
    """Raises AssertionError when sequences with different prompts all have the same tokens: then hidden states are
    lost."""
    texts = [tuple(tokens) for tokens in outputs]
    if len(texts) > 1 and len(set(texts)) == 1:
        raise AssertionError(f"the work is not real: all {len(texts)} sequences have the same tokens, {texts[0][:8]}")


def void_unless(check: Callable[..., None], *given: Any) -> dict[str, dict[str, str]]:
    """Figures that say why a check fails, none where it holds. A run with such figures is written, and ends with status
    1."""
    try:
        check(*given)
    except AssertionError as failed:
        return {VOID: {"why": str(failed)}}
    return {}


def check_experts(distinct: Mapping[str, Sequence[int]], chosen: int) -> None:
    """Raises AssertionError when many tokens read no more experts of any layer than one token chooses.

    distinct: experts that a step reads, a number for each layer, by batch
    chosen: experts of a token
    """
    batch = max(distinct, key=int)
    if int(batch) > chosen and max(distinct[batch]) <= chosen:
        raise AssertionError(f"the work is not real: {batch} tokens read {max(distinct[batch])} experts of a layer")
