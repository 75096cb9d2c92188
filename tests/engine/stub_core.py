"""A core without a model: tokens come from a table of logits, or from a script. For tests of what drives a core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.requests.request import CoreInfo, CoreStats, EngineCoreOutput, EngineRequest, PositionLogprobs


def info(vocab: int, **changes: int) -> CoreInfo:
    """Of a small core; ``changes`` replace its numbers."""
    plain = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 65}
    plain |= {"capacity": 256, "max_logprobs": 20, "max_logit_bias": 1024}
    return CoreInfo(**{**plain, "vocab": vocab, **changes}, device="cpu")  # type: ignore[arg-type]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of the last dimension, float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class StubCore:
    """The interface of EngineCore.

    logits: [V, V, V], by the last two tokens. script: output tokens by prompt, instead of logits. width: tokens of an
    update at most. failing: exceptions that steps raise, by their number. refused: ids that `add` refuses.
    """

    def __init__(
        self,
        info: CoreInfo,
        logits: np.ndarray | None = None,
        script: Mapping[tuple[int, ...], list[int]] | None = None,
        width: int = 1,
    ) -> None:
        self.info, self._script, self._width = info, script or {}, width
        self._logprobs = None if logits is None else log_softmax(logits)
        self.waiting: list[EngineRequest] = []
        self.running: dict[str, tuple[EngineRequest, list[int]]] = {}
        self._news: list[EngineCoreOutput] = []
        self.failing: dict[int, BaseException] = {}
        self.refused: set[str] = set()
        self.steps, self.closed, self.kernels_done = 0, False, 0
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self._news)

    def add(self, request: EngineRequest) -> None:
        if request.id in self.refused:
            raise ConfigError(f"{request.id}: refused")
        self.added.append(request)
        self.waiting.append(request)

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            waiting = [r for r in self.waiting if r.id == id]
            if waiting or id in self.running:
                self.waiting = [r for r in self.waiting if r.id != id]
                self.running.pop(id, None)
                self._news.append(EngineCoreOutput(id, [], "abort"))
                self.aborted.append(id)

    def step(self) -> list[EngineCoreOutput]:
        self.steps += 1
        if self.steps in self.failing:
            raise self.failing[self.steps]
        self.waiting.sort(key=lambda r: r.priority)
        while self.waiting and len(self.running) < self.info.max_num_seqs:
            request = self.waiting.pop(0)
            self.running[request.id] = (request, [])
        news, self._news = self._news, []
        for request, output in list(self.running.values()):
            news.append(self.advance(request, output))
        return news

    def stats(self) -> CoreStats:
        return CoreStats(steps=self.steps, running=len(self.running), waiting=len(self.waiting))

    wakeup_fd = None

    def hear(self) -> None:
        pass

    def warm_up(self) -> bool:
        return False

    def check_health(self) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def close(self) -> None:
        self.closed = True

    def advance(self, request: EngineRequest, output: list[int]) -> EngineCoreOutput:
        p, update = request.params, EngineCoreOutput(request.id, [])
        if not output and p.prompt_logprobs is not None:
            known = request.prompt
            update.prompt_logprobs = [
                self._ranked(known[:i], known[i], p.prompt_logprobs) for i in range(1, len(known))
            ]
        if not output and not request.fork_of:
            update.cached = len(request.prompt) // 2
        for _ in range(self._width):
            token = self._next(request, output)
            if p.logprobs is not None:
                ranked = self._ranked([*request.prompt, *output], token, p.logprobs)
                update.logprobs = [*(update.logprobs or []), ranked]
            output.append(token)
            update.tokens.append(token)
            if token in request.stop_ids and len(output) > p.min_tokens:
                update.finish_reason = "stop"
            elif len(output) == request.limit:
                update.finish_reason = "length"
            if update.finish_reason is not None:
                del self.running[request.id]
                break
        return update

    def _next(self, request: EngineRequest, output: list[int]) -> int:
        if (script := self._script.get(tuple(request.prompt))) is not None:
            return script[len(output)]
        p, scores = request.params, self._scores([*request.prompt, *output]).copy()
        if len(output) < p.min_tokens:
            scores[request.stop_ids] = -np.inf
        if p.temperature == 0:
            return int(scores.argmax())
        weights = np.exp(scores / p.temperature)
        seed = [request.seed % 2**64, len(output)]
        return int(np.random.default_rng(seed).choice(len(weights), p=weights / weights.sum()))

    def _scores(self, known: list[int]) -> np.ndarray:
        assert self._logprobs is not None, "a script without logits has no log-probabilities"
        return self._logprobs[known[-2] if len(known) > 1 else 0, known[-1]]

    def _ranked(self, known: list[int], token: int, count: int) -> PositionLogprobs:
        scores = self._scores(known)
        order = np.argsort(-scores, kind="stable")[: len(scores) if count == -1 else count]
        rank = int((scores > scores[token]).sum()) + 1
        return PositionLogprobs(token, float(scores[token]), rank, order.tolist(), scores[order].tolist())
