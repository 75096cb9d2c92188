"""News: what leaves a core: outputs of requests that ended outside a step, and what the first and the last output of a
request hold in addition to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphllm.engine.requests.request import EngineCoreOutput
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.step_meter import StepMeter

_NO_TOKEN = (
    "no token can be chosen: the model's logits are NaN or everything is forbidden. Check the checkpoint, or use a "
    "dtype of more range (--dtype float32)"
)


class News:
    """complete, end: of the parts; see `Part`. meter: counts ends and tokens."""

    def __init__(
        self,
        complete: Sequence[Callable[[RequestState, EngineCoreOutput], None]],
        end: Sequence[Callable[[str, Sequence[int]], None]],
        meter: StepMeter,
    ) -> None:
        self._complete, self._end, self._meter = complete, end, meter
        self._outputs: list[EngineCoreOutput] = []

    def __len__(self) -> int:
        """Outputs that nobody has taken yet."""
        return len(self._outputs)

    def take(self) -> list[EngineCoreOutput]:
        """The outputs, once."""
        found, self._outputs = self._outputs, []
        return found

    def answer(self, output: EngineCoreOutput) -> None:
        """A request is answered that parts do not know."""
        self._meter.count_end(output.finish_reason)
        self._outputs.append(output)

    def end(self, output: EngineCoreOutput) -> None:
        """A request has ended outside a step's result."""
        self._forget(output.id)
        self.answer(output)

    def complete(self, state: RequestState, output: EngineCoreOutput) -> None:
        """Fill in what an output holds in addition to tokens: figures of the prompt with the first, the end with the
        last."""
        began, stats = len(state.output) == len(output.tokens), self._meter.stats
        for complete in self._complete:
            complete(state, output)
        if began:
            output.cached, output.scheduled = state.cached_tokens, state.scheduled
            stats.prompt_tokens += len(state.request.prompt)
            stats.cached_tokens += state.cached_tokens
        if state.finish_reason is not None:
            output.finish_reason, output.stop_reason = state.finish_reason, state.stop_reason
            output.error, output.mistake = state.error, state.mistake
            output.draft_tokens, output.accepted_tokens = state.draft_tokens, state.accepted_tokens
            if state.finish_reason == "error" and output.error is None:
                output.error = _NO_TOKEN
            self._meter.count_end(output.finish_reason)
            self._forget(output.id, state.output)

    def _forget(self, id: str, output: Sequence[int] = ()) -> None:
        for end in self._end:
            end(id, output)
