"""What an engine has counted, as objects: `LLM.get_metrics`. Names and shapes are vLLM's reader's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.metrics.metric_families import BY_NAME, OF_CORE, OF_REQUESTS, Family, Finished
from graphllm.engine.requests.outputs import RequestOutput
from graphllm.engine.requests.request import CoreStats, Distribution

_FIRST_TOKEN, _FINISHED = BY_NAME["time_to_first_token_seconds"], BY_NAME["requests_finished"]


@dataclass(frozen=True)
class Metric:
    """name: vLLM's where it has the metric, as "vllm:generation_tokens", else "graphllm_..."."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A number as of now."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Numbers by position. There are none yet; scripts that look for them find the class."""

    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    """Values, counted. buckets: how many are up to each bound, by the bound as text."""

    count: int
    sum: float
    buckets: dict[str, int]


class MetricsReader:
    """Counts the requests of one engine that have ended, and reads what its core has counted."""

    def __init__(self) -> None:
        spread = (*OF_REQUESTS, _FIRST_TOKEN)
        self._spread = {family.name: Distribution.over(family.bounds) for family in spread}
        self._ends = {labels[0]: 0 for labels in _FINISHED.start}

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Count a request by its last output, which is a whole one."""
        for completion in output.outputs:
            reason = str(completion.finish_reason)
            self._ends[reason] = self._ends.get(reason, 0) + 1
        times, cached = output.metrics, output.num_cached_tokens
        lengths = [len(completion.token_ids) for completion in output.outputs]
        done = Finished(times, params, len(output.prompt_token_ids), cached, lengths)
        for family in OF_REQUESTS:
            if family.request is not None and (value := family.request(done)) is not None:
                self._spread[family.name].observe(value)
        if times.first_token_time:
            self._spread[_FIRST_TOKEN.name].observe(times.first_token_time - times.arrival_time)

    def read(self, stats: CoreStats) -> list[Metric]:
        """Everything, with the core's figures as of now."""
        found = [
            _metric(family, labels, value)
            for family in OF_CORE
            if family.core is not None
            for labels, value in family.core(stats).items()
        ]
        found += [_metric(BY_NAME[name], (), value) for name, value in self._spread.items()]
        return found + [_metric(_FINISHED, (reason,), count) for reason, count in self._ends.items()]


def _metric(family: Family, values: tuple[str, ...], value: float | Distribution) -> Metric:
    name = f"vllm:{family.alias}" if family.alias else f"graphllm_{family.name}"
    labels = dict(zip(family.labels, values, strict=True))
    if isinstance(value, Distribution):
        return _histogram(name, labels, value)
    return Counter(name, labels, int(value)) if family.kind == "counter" else Gauge(name, labels, float(value))


def _histogram(name: str, labels: Mapping[str, str], value: Distribution) -> Histogram:
    buckets = {"+Inf" if bound == math.inf else f"{bound:g}": count for bound, count in value.cumulative()}
    return Histogram(name, dict(labels), buckets["+Inf"], value.total, buckets)
