"""Logits processors as classes that keep a state for the whole batch, of vLLM's shape.

A class gets what joins, leaves and moves in the batch (`BatchUpdate`) before it edits the logits of a step, so that it
can hold its own arrays by row. `adapted` turns it into a function that the engine calls; docs/logits-processors.md has
both kinds.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.options import LogitsProcessor as Function
from graphllm.engine.requests.options import Row

if TYPE_CHECKING:
    import torch


class MoveDirectionality(enum.Enum):
    """Of two rows: the first becomes the second, or they change places."""

    UNIDIRECTIONAL = 0
    SWAP = 1


class BatchUpdate(NamedTuple):
    """How the batch has changed, in this order.

    removed: rows that lost their requests.
    added: row, parameters, prompt, and the output so far, a list that grows with the request.
    moved: from, to, and how; the target row has lost its request, or the two rows exchange theirs.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


@dataclass(frozen=True)
class ModelLimits:
    """Of the model that runs."""

    max_model_len: int
    vocab_size: int

    def get_vocab_size(self) -> int:
        """The same, as a call."""
        return self.vocab_size


@dataclass(frozen=True)
class BatchLimits:
    """Of its steps."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class ProcessorConfig:
    """What a processor knows about the engine."""

    model_config: ModelLimits
    scheduler_config: BatchLimits


class LogitsProcessor(ABC):
    """To derive from, if you like; a class with these methods is enough."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters of a request that cannot be."""
        return

    @abstractmethod
    def __init__(self, vllm_config: ProcessorConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The edited logits [batch, vocabulary]: the same tensor or another."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the largest logit stays the largest. Both kinds are called in every step here."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """How the batch has changed since the last step; None where it has not."""


class AdapterLogitsProcessor(LogitsProcessor):
    """To derive from, for processors of single requests: say which there is by `new_req_logits_processor`."""

    def __init__(self, vllm_config: ProcessorConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """A function of a request's output and its logits [vocabulary], or of its prompt, output and logits; None for
        a request that has none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep one function for each row."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._requests.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._requests.pop(index, None)
            if (function := self.new_req_logits_processor(params)) is not None:
                self._requests[index] = _bound(function, prompt or [], output)
        for source, to, _ in batch_update.moved:
            moving, other = self._requests.pop(source, None), self._requests.pop(to, None)
            if moving is not None:
                self._requests[to] = moving
            if other is not None:
                self._requests[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Each row by its own function."""
        for index, function in self._requests.items():
            logits[index] = function(logits[index])
        return logits


def _bound(function: Callable[..., Any], prompt: list[int], output: list[int]) -> Callable[[torch.Tensor], Any]:
    import inspect

    if len(inspect.signature(function).parameters) == 3:
        return lambda row: function(prompt, output, row)
    return lambda row: function(output, row)


def adapted(processor: Any, config: ProcessorConfig, device: torch.device) -> Function:
    """A function as it is; for a class, an instance that gets the changes of the batch."""
    if not isinstance(processor, type):
        return processor
    return _Batch(processor(config, device, False))


class _Batch:
    """Keeps the rows of one processor's batch: dense from 0, the last one moving to where one has left."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self.__name__ = type(processor).__name__
        self.validate_params = getattr(processor, "validate_params", lambda params: None)
        self._order: list[str] = []  # request ids by row
        self._outputs: dict[str, list[int]] = {}

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        at = {row.request_id: i for i, row in enumerate(rows) if not row.in_prompt}
        update = self._update({id: rows[i] for id, i in at.items()})
        for id, i in at.items():
            known, output = self._outputs[id], rows[i].output
            known += output[len(known) :]
        self._processor.update_state(update)
        if not self._order:
            return
        places = [at[id] for id in self._order]
        if places == list(range(len(logits))):
            edited = self._processor.apply(logits)
            if edited is not logits:
                logits.copy_(edited)
        else:
            logits[places] = self._processor.apply(logits[places])

    def _update(self, present: dict[str, Row]) -> BatchUpdate | None:
        """Let requests join, leave and move."""
        order = self._order
        holes = [i for i, id in enumerate(order) if id not in present]
        new = [id for id in present if id not in self._outputs]
        if not holes and not new:
            return None
        for i in holes:
            del self._outputs[order[i]]
        free = list(reversed(holes))
        added = []
        for id in new:
            row = present[id]
            self._outputs[id] = list(row.output)
            index = free.pop() if free else len(order)
            order[index : index + 1] = [id]
            added.append((index, row.params, list(row.prompt), self._outputs[id]))
        moved = []
        for index in sorted(free, reverse=True):  # rows after the last hole have requests
            last = len(order) - 1
            if index != last:
                moved.append((last, index, MoveDirectionality.UNIDIRECTIONAL))
                order[index] = order[last]
            order.pop()
        return BatchUpdate(len(order), holes, added, moved)
