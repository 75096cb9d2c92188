"""`Driver`: the loop that drives an engine core of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from graphllm.config import ConfigError
from graphllm.engine.requests.outputs import OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import ParsedRequest, Processor
from graphllm.engine.requests.request import Core, EngineCoreOutput, EngineRequest
from graphllm.engine.vectors.pooling import PoolingRequest
from graphllm.entrypoints.offline import Interrupts

Request = ParsedRequest | PoolingRequest  # for text, for a vector
# The results of one step: the core's updates for every request, and the outputs made of them for requests for text.
Step = tuple[list[EngineCoreOutput], list[RequestOutput]]


class Driver:
    """Adds requests to a core, steps it, and ends requests that are done. For one thread at a time.

    core: runs requests; whoever made it closes it.
    processor: makes requests of prompts.
    outputs: makes texts of tokens.
    asleep: the core runs nothing until it is woken up.
    """

    def __init__(self, core: Core, processor: Processor, outputs: OutputProcessor) -> None:
        self.core, self.processor, self.outputs = core, processor, outputs
        self.asleep = False

    def submit(self, *requests: Request) -> None:
        """Queue requests: all of them, or none. Raises ConfigError when the core refuses one."""
        begun = 0
        try:
            for request in requests:
                if isinstance(request, ParsedRequest):
                    self.outputs.add(request)
                begun += 1
                for part in _parts(request):
                    self.core.add(part)
        except ConfigError:
            self._withdraw(requests[:begun])
            raise

    def step(self) -> Step:
        """One step of the core. A request with a stop string in its text ends in the core, too."""
        updates = self.core.step()
        if not self.outputs.unfinished:
            return updates, []
        outputs, aborts = self.outputs.process(updates)
        if aborts:
            self.core.abort(aborts)
        return updates, outputs

    def drain(self) -> None:
        """Step until the core has nothing to do, and drop the results."""
        while self.core.unfinished:
            self.core.step()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests for text, without another output. Unknown ids are ignored."""
        self.core.abort(self.outputs.abort(request_ids))

    def run(self, requests: Iterable[Request], take: Callable[[Step], None], ahead: bool = False) -> None:
        """Run requests to their end.

        take: gets each step.
        ahead: a step begins each time the requests so far fill one. The next requests are then made while the device
        works. Otherwise all requests are queued before the first step.

        No request stays in the core: Ctrl-C, or a request that is refused or cannot be made, ends all of them, and the
        exception goes on.
        """
        if self.asleep:
            raise ConfigError("the engine is asleep: call wake_up first, of all tags")
        begun: list[Request] = []
        tokens = 0
        with Interrupts() as interrupts:
            try:
                for request in requests:
                    begun.append(request)
                    self.submit(request)
                    tokens += sum(len(part.prompt) for part in _parts(request)) if ahead else 0
                    if ahead and tokens >= self.core.info.max_num_batched_tokens:
                        tokens = 0
                        interrupts.check()
                        take(self.step())
                while self.core.unfinished:
                    interrupts.check()
                    take(self.step())
            except BaseException as reason:
                self._withdraw(begun)
                if isinstance(reason, (KeyboardInterrupt, ConfigError)):  # else the core is broken
                    self.drain()
                raise

    def finish(
        self, requests: Sequence[ParsedRequest], done: Callable[[RequestOutput], None] = lambda output: None
    ) -> list[RequestOutput]:
        """The outputs of requests for text, in their order, by `run`. done: gets each output as its request ends."""
        finished: dict[str, RequestOutput] = {}

        def take(step: Step) -> None:
            for output in step[1]:
                if output.finished:
                    finished[output.request_id] = output
                    done(output)

        self.run(requests, take)
        return [finished[request.request_id] for request in requests]

    def _withdraw(self, requests: Iterable[Request]) -> None:
        texts = [request.request_id for request in requests if isinstance(request, ParsedRequest)]
        vectors = [request.id for request in requests if isinstance(request, PoolingRequest)]
        self.core.abort([*self.outputs.abort(texts), *vectors])


def _parts(request: Request) -> Sequence[EngineRequest]:
    return request.requests if isinstance(request, ParsedRequest) else (request.request,)
