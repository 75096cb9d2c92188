"""What fills the inputs that a model declares itself, from the requests of a step.

A provider is found by the name that the `InputSpec` gives: one of this file, or what a package offers under the entry
point group ``graphllm.input_providers``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.program.specs import InputSpec

GROUP = "graphllm.input_providers"
_ELSEWHERE = ("block_table",)  # filled with the inputs of every graph


class StepRequests(NamedTuple):
    """The n requests of a step, in order. slots, starts, counts, rows [n] int32: the slot of each, the position of its
    first token in the step, how many there are, and how many of its rows are sampled from or scored. positions
    [T] int32: of every token in its sequence. table: by slot. exports: see `SchedulerOutput`."""

    requests: list[RequestState]
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    table: RequestTable
    exports: np.ndarray | None = None


Provider = Callable[[InputSpec, StepRequests], np.ndarray | None]
"""Gives an input's values for a step's tokens or sequences, without padding; None where it is neutral throughout. It
runs on every step: it should be quick for a step with one token a sequence."""


def find_providers(inputs: Iterable[InputSpec]) -> list[tuple[InputSpec, Provider]]:
    """The inputs that have a provider. Raises ConfigError for a name that no package offers."""
    found = []
    for spec in inputs:
        if spec.provider and spec.provider not in _ELSEWHERE:
            provider = _OWN.get(spec.provider) or _offered(spec.provider)
            if provider is None:
                raise ConfigError(
                    f"the model's input {spec.name!r} is filled by the provider {spec.provider!r}, which no installed "
                    "package offers; install it"
                )
            found.append((spec, provider))
    return found


def _offered(name: str) -> Provider | None:
    return next((entry.load() for entry in entry_points(group=GROUP, name=name)), None)


def provide(
    providers: Iterable[tuple[InputSpec, Provider]],
    output: SchedulerOutput,
    table: RequestTable,
    arrays: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """The inputs of a step that are not neutral throughout. arrays: the inputs of every graph."""
    step = StepRequests(
        output.requests, output.slots, output.starts, output.counts, output.rows, arrays["positions"], table,
        output.exports,
    )  # fmt: skip
    made = ((spec.name, provider(spec, step)) for spec, provider in providers)
    return {name: values for name, values in made if values is not None}


def _adapter_ids(spec: InputSpec, step: StepRequests) -> np.ndarray | None:
    """[S], [T] or [R]: entries of adapters' tables."""
    ids = step.table.adapter_id[step.slots]
    if not np.count_nonzero(ids):
        return None
    if spec.shape == ("S",):
        return ids
    return np.repeat(ids, step.rows if spec.shape == ("R",) else step.counts)


def _item_rows(spec: InputSpec, step: StepRequests) -> np.ndarray | None:
    """[T]: the row of an item state that stands in for a token, -1 for those that are tokens."""
    rows: np.ndarray | None = None
    ends = np.cumsum(step.counts)
    for i in np.flatnonzero(step.starts < step.table.num_prompt_tokens[step.slots]).tolist():  # items lie in prompts
        state, start, end = step.requests[i], int(step.starts[i]), int(step.starts[i] + step.counts[i])
        for item, first in zip(state.request.items, state.item_starts, strict=True):
            low, high = max(start, item.position), min(end, item.position + item.length)
            if item.position >= 0 and low < high:
                rows = np.full(len(step.positions), -1, dtype=np.int32) if rows is None else rows
                at = int(ends[i]) - end
                rows[at + low : at + high] = np.arange(first + low - item.position, first + high - item.position)
    return rows


def _next_tokens(spec: InputSpec, step: StepRequests) -> np.ndarray | None:
    """[S]: the known token after the last one of the step; -1 where the next token is sampled."""
    ends = step.starts + step.counts
    inside = np.flatnonzero(ends < step.table.num_tokens[step.slots])
    if not len(inside):
        return None
    tokens = np.full(len(ends), -1, dtype=np.int32)
    for i in inside.tolist():
        tokens[i] = step.requests[i].tokens(int(ends[i]), int(ends[i]) + 1)[0]
    return tokens


def _temperature(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[S]: at which each request samples, 0 for greedy ones."""
    return step.table.temperature[step.slots]


def _seed(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[S]: of each request's random numbers."""
    return step.table.seed[step.slots]


def _item_start(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[S]: the first row of the item that all tokens of a sequence see; a request has one at most."""
    return step.table.seen_start[step.slots]


def _item_length(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[S]: its rows, 0 where there is none."""
    return step.table.seen_length[step.slots]


def _token_types(spec: InputSpec, step: StepRequests) -> np.ndarray | None:
    """[T]: 1 in the second of two texts."""
    seconds = [state.request.second for state in step.requests]
    if not any(seconds):
        return None
    first = np.repeat([second or len(s.request.prompt) for second, s in zip(seconds, step.requests, strict=True)],
                      step.counts)  # fmt: skip
    return (step.positions >= first).astype(np.int32)


def _sequence_ids(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[T]: the sequence of each token."""
    return np.repeat(np.arange(len(step.counts), dtype=np.int32), step.counts)


def _exports(spec: InputSpec, step: StepRequests) -> np.ndarray | None:
    """[S]: the entry that has a recurrent state from inside of a sequence's chunk after the step."""
    return step.exports


def _fresh(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[S]: 1 for a sequence that has its first token in the step."""
    return (step.starts == 0).astype(np.int32)


def _num_decodes(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[1]: how many of the first sequences have one token."""
    longer = step.counts != 1
    return np.array([np.argmax(longer) if longer.any() else len(longer)], dtype=np.int32)


def _chunks(spec: InputSpec, step: StepRequests) -> np.ndarray:
    """[T // C + S, 2]: pieces of C tokens, the last one of a sequence shorter: its sequence, and its first row in the
    step. C is what the shape says."""
    size = chunk_size(spec)
    pieces = -(-step.counts // size)
    sequence = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
    first = np.cumsum(step.counts) - step.counts
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.stack([sequence, (first[sequence] + size * within).astype(np.int32)], axis=1)


def chunk_size(spec: InputSpec) -> int:
    """C of an input with the provider "chunks". Raises ConfigError for another shape than ("T // C + S", 2)."""
    match = re.fullmatch(r"T // (\d+) \+ S", str(spec.shape[0]))
    if match is None or spec.shape[1:] != (2,) or int(match[1]) < 1:
        raise ConfigError(f'the input {spec.name!r} of the provider "chunks" needs the shape ("T // C + S", 2)')
    return int(match[1])


_OWN: Mapping[str, Provider] = {
    "sequence_ids": _sequence_ids,
    "exports": _exports,
    "fresh": _fresh,
    "num_decodes": _num_decodes,
    "chunks": _chunks,
    "adapter_ids": _adapter_ids,
    "item_rows": _item_rows,
    "item_start": _item_start,
    "item_length": _item_length,
    "next_tokens": _next_tokens,
    "token_types": _token_types,
    "seed": _seed,
    "temperature": _temperature,
}
