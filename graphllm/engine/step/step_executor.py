"""What the engine core asks of whoever runs its steps: `graphllm.runtime.executor.Executor` does so in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphllm.config import Bucket
from graphllm.engine.step.device_states import DeviceStates
from graphllm.program.schema import CacheLayout
from graphllm.program.specs import InputSpec
from graphllm.runtime.memory.padding import Size
from graphllm.runtime.memory.staging import StepInput
from graphllm.weights.adapters.adapted import AdaptedLinear

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.step_handle import StepResult


class Handle(Protocol):
    """A step that was started. size: what it is padded to."""

    @property
    def size(self) -> Size: ...

    def wait(self) -> StepResult:
        """Its results, once. Raises what the device reported."""


class StepExecutor(DeviceStates, Protocol):
    """task: of the main graph.

    inputs: by name; providers fill some of them.
    item_input: what an encoder reads of an item, None without an encoder; and for how many tokens at most.
    max_rows: sampled rows of a step.
    vector: of the task "pool": the symbol that there is a vector for each of, "R" or "T", and its numbers.
    shareable: cached states of a prefix are valid whatever follows it.
    device_drafts: every sequence that has sampled a token has drafts in slot states.
    kernels_done: how many have run, as far as is known; any thread may ask.
    outputs: the results that every step copies to the host.
    device: its ``type`` is "cpu" or "cuda".
    adapted: layers with tables for adapters of max_lora_rank.
    """

    @property
    def task(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, InputSpec]: ...
    @property
    def item_input(self) -> tuple[InputSpec | None, int]: ...
    @property
    def layout(self) -> CacheLayout: ...
    @property
    def buckets(self) -> Sequence[Bucket]: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def max_logit_bias(self) -> int: ...
    @property
    def vector(self) -> tuple[str, int]: ...
    @property
    def shareable(self) -> bool: ...
    @property
    def device_drafts(self) -> bool: ...
    @property
    def kernels_done(self) -> int: ...
    @property
    def outputs(self) -> Collection[str]: ...
    @property
    def device(self) -> Any: ...
    @property
    def adapted(self) -> Sequence[AdaptedLinear]: ...
    @property
    def max_lora_rank(self) -> int: ...

    def start(self, step: StepInput, program: str = "plain", drafts: bool = False) -> Handle:
        """Start a step; returns at once. A program with parts stops at its first one, and `sample` must follow. drafts:
        see `Executor.start`."""

    def sample(
        self,
        handle: Any,
        mask: np.ndarray | None = None,
        scores: bool = False,
        whole: Sequence[int] = (),
        hook: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Go on with a step of the program "full"; see `Executor.sample`."""

    def warm_up(self, bucket: Bucket) -> None:
        """See `Executor.warm_up`."""

    def check_health(self) -> None:
        """Raise when a process that runs the steps is gone."""

    def close(self) -> None:
        """Wait for everything and stop."""
