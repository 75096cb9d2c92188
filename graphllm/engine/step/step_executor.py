"""What the engine core asks of whoever runs its steps: `graphllm.runtime.executor.Executor` does so in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from graphllm.config import Bucket
from graphllm.engine.step.device_states import DeviceStates
from graphllm.program.schema import CacheLayout
from graphllm.program.specs import InputSpec
from graphllm.runtime.memory.padding import Size
from graphllm.runtime.memory.staging import Sampling, StepInput
from graphllm.weights.adapters.adapted import AdaptedLinear

if TYPE_CHECKING:
    from graphllm.program.artifact import Artifact
    from graphllm.runtime.programs import Programs
    from graphllm.runtime.step_handle import StepResult


class Handle(Protocol):
    """A step that was started. size: what it is padded to."""

    @property
    def size(self) -> Size: ...

    def wait(self) -> StepResult:
        """Its results, once. Raises what the device reported."""


class Successor(Protocol):
    """What waits for an artifact that is being compiled, for `StepExecutor.take`."""

    def begin(self, prepare: Callable[[Artifact], Programs]) -> None:
        """Wait, and have the artifact prepared when it is there, in another thread than that of the steps."""

    def ready(self) -> Programs | None:
        """Its programs, once they are prepared; at once."""
        ...

    def close(self) -> None:
        """Wait no more."""


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

    task: str
    inputs: Mapping[str, InputSpec]
    item_input: tuple[InputSpec | None, int]
    layout: CacheLayout
    buckets: tuple[Bucket, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_rows: int
    vocab: int
    max_logprobs: int
    max_logit_bias: int
    vector: tuple[str, int]
    shareable: bool
    device_drafts: bool
    outputs: Collection[str]
    device: Any
    adapted: Sequence[AdaptedLinear]
    max_lora_rank: int

    @property
    def kernels_done(self) -> int: ...

    def start(self, step: StepInput, program: str = "plain", drafts: bool = False) -> Handle:
        """Start a step; returns at once. A program with parts stops at its first one, and `sample` must follow. drafts:
        see `Executor.start`."""

    def sample(self, handle: Any, sampling: Sampling) -> None:
        """Go on with a step of the program "full"; see `Executor.sample`."""

    def warm_up(self, bucket: Bucket) -> None:
        """See `Executor.warm_up`."""

    def prepare(self, artifact: Artifact) -> Programs:
        """See `Executor.prepare`."""
        ...

    def take(self, programs: Programs) -> None:
        """See `Executor.take`."""

    def check_health(self) -> None:
        """Raise when a process that runs the steps is gone."""

    def close(self) -> None:
        """Wait for everything and stop."""
