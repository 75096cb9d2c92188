"""Prometheus metrics of the server, each family under this project's name and, where there is one, vLLM's.

Used from one event loop. Requests are counted by their `Tracker`; the engine core's own figures come with each reading.
The table of families is `graphllm.engine.metrics.metric_families`.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector

from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.metrics.metric_families import (
    BY_NAME,
    COUNTED,
    FAMILIES,
    OF_CORE,
    OF_REQUESTS,
    UP,
    Family,
    Finished,
    Labels,
    Series,
    Value,
)
from graphllm.engine.requests.outputs import RequestMetrics, RequestOutput
from graphllm.engine.requests.request import CoreStats, Distribution
from graphllm.version import __version__

_UNKNOWN = 10  # seconds after which to ask again, while no request has ended yet

Counted = dict[str, list[tuple[Labels, Value]]]
"""What one process has counted, by family."""


class Metrics(Collector):
    """All metrics of one server, or what one of its processes counts.

    model_name: for vLLM's label of that name.
    build: facts about the model, shown with the version as labels of graphllm_build_info.
    processes: ids of the server's processes by their names, where it has several; a label has the name.
    rank: of the first engine core.
    """

    def __init__(
        self,
        model_name: str,
        build: Mapping[str, str] | None = None,
        processes: Callable[[], Mapping[str, int]] | None = None,
        rank: int = 0,
    ) -> None:
        # Requests are counted for all cores together.
        self._alias_labels = {"model_name": model_name, "engine": str(rank)}
        self._counts: dict[str, dict[Labels, float]] = {}
        self._spread: dict[str, dict[Labels, Distribution]] = {}
        for family in (*OF_REQUESTS, *COUNTED):
            if family.kind == "histogram":
                self._spread[family.name] = {labels: Distribution.over(family.bounds) for labels in family.start}
            else:
                self._counts[family.name] = dict.fromkeys(family.start, 0.0)
        self.first_token = self._distribution("time_to_first_token_seconds")
        self.between_tokens = self._distribution("inter_token_latency_seconds")
        self._ends: deque[float] = deque(maxlen=256)  # of requests, the latest
        self._cores = [_CoreFigures()]
        self._others: Sequence[Counted] = ()  # of other processes, now
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(self)
        self._registry.register(
            prometheus.ProcessCollector(registry=None) if processes is None else _Processes(processes)
        )
        self._info = prometheus.Info("graphllm_build", "What is served, and by which version.", registry=None)
        self._info.info({**(build or {}), "version": __version__})

    def track(self, params: SamplingParams) -> Tracker:
        """Begin to count a request."""
        return Tracker(self, params)

    def rejected(self, reason: str) -> None:
        """Count a request that was refused. reason: the name of the limit, such as "max_num_queued_reqs"."""
        self._count("admission_rejections", reason)

    def completed(self, reason: str) -> None:
        """Count a completion that ended, by its finish_reason."""
        self._count("requests_finished", reason)

    def ended(self) -> None:
        """A request is over."""
        self._ends.append(time.monotonic())

    def seconds_for(self, requests: int) -> int:
        """Seconds that this many requests will take, by the latest ones; a minute at most."""
        if not self._ends:
            return _UNKNOWN
        return max(1, min(60, math.ceil(requests * (time.monotonic() - self._ends[0]) / len(self._ends))))

    def finished(self, done: Finished) -> None:
        """Count a request that ran to its end."""
        for family in OF_REQUESTS:
            assert family.request is not None
            if (value := family.request(done)) is not None:
                self._distribution(family.name).observe(value)

    def http_begins(self) -> None:
        """An HTTP request has come; `http` must follow."""
        self._counts["http_requests_in_flight"][()] += 1

    def http(self, route: str, status: int, seconds: float) -> None:
        """An HTTP request was answered, or its client left. route: the path's pattern, one name for all unknown paths:
        each value makes series of its own."""
        self._counts["http_requests_in_flight"][()] -= 1
        self._count("http_requests", route, str(status))
        self._distribution("http_request_seconds", route).observe(seconds)

    def startup(self, phases: Mapping[str, float]) -> None:
        """The seconds of each phase of the engine's start; they replace the seconds of an earlier start."""
        self._counts["startup_seconds"] = {(phase,): seconds for phase, seconds in phases.items()}

    @property
    def in_flight(self) -> int:
        """HTTP requests that are not answered yet."""
        return int(self._counts["http_requests_in_flight"][()])

    def counted(self) -> Counted:
        """What this process has counted, for `render` in another one."""
        families = (*OF_REQUESTS, *COUNTED)
        return {family.name: list(self._own(family).items()) for family in families}

    def absorb(self, counted: Counted) -> None:
        """Keep what a process that is gone has counted."""
        for family in (*OF_REQUESTS, *COUNTED):
            for labels, value in counted.get(family.name, ()):
                if isinstance(value, Distribution):
                    kept = self._distribution(family.name, *labels)
                    total = kept + value
                    kept.counts, kept.total = total.counts, total.total
                elif family.kind == "counter":
                    self._counts[family.name][labels] = self._counts[family.name].get(labels, 0.0) + value

    def render(
        self, stats: Sequence[CoreStats | None], openmetrics: bool = False, others: Sequence[Counted] = ()
    ) -> tuple[bytes, str]:
        """The text of all metrics and its content type. stats: each core's figures as of now, None if it does not
        answer; its counters then stay what they were, and go on from there when another core has taken its place. Where
        there are several, the label engine tells them apart. others: what other processes of this server have
        counted."""
        self.refresh(stats, others)
        return text_of(self._registry, openmetrics)

    def refresh(self, stats: Sequence[CoreStats | None], others: Sequence[Counted] = ()) -> None:
        """Take in what others know now; as in `render`."""
        self._others = others
        while len(self._cores) < len(stats):
            self._cores.append(_CoreFigures())
        for core, now in zip(self._cores, stats, strict=False):
            core.see(now)

    def collect(self) -> Iterator[Metric]:
        """For the registry: every family under its own name, then under vLLM's."""
        for family in FAMILIES:
            metrics = self._of_cores(family) if family.core else [_metric(family, self._series(family))]
            metric = metrics[0]
            for other in metrics[1:]:
                metric.samples += other.samples
            if metric.samples:
                yield metric
                if family.alias:
                    yield _renamed(metric, "vllm:" + family.alias, self._alias_labels)
        yield from self._info.collect()

    def _of_cores(self, family: Family) -> list[Metric]:
        """One for each core, with its number as a label where there are several."""
        found = [_metric(family, core.series(family)) for core in self._cores]
        for number, metric in enumerate(found if len(found) > 1 else ()):
            metric.samples = [
                sample._replace(labels={"engine": str(number), **sample.labels}) for sample in metric.samples
            ]
        return found

    def _count(self, name: str, *labels: str) -> None:
        counts = self._counts[name]
        counts[labels] = counts.get(labels, 0.0) + 1

    def _distribution(self, name: str, *labels: str) -> Distribution:
        series = self._spread[name]
        if labels not in series:
            series[labels] = Distribution.over(BY_NAME[name].bounds)
        return series[labels]

    def _series(self, family: Family) -> Series:
        return _sum(self._own(family), *(dict(counted.get(family.name, ())) for counted in self._others))

    def _own(self, family: Family) -> Series:
        """What was counted here."""
        return self._spread[family.name] if family.kind == "histogram" else self._counts[family.name]


class _CoreFigures:
    """What one core, and those before it in its place, have counted."""

    def __init__(self) -> None:
        self._now = CoreStats()  # as it was last known
        self._up = False  # it answered just now
        self._gone: dict[str, Series] = {}  # what cores before it had counted

    def see(self, stats: CoreStats | None) -> None:
        """Its figures as of now, None if it does not answer."""
        self._up = stats is not None
        if stats is not None:
            if stats.started != self._now.started:
                self._gone = {f.name: self._cumulated(f) for f in OF_CORE if f.kind != "gauge"}
            self._now = stats

    def series(self, family: Family) -> Series:
        """Of a family that cores fill."""
        assert family.core is not None
        if family.name == UP.name:
            return {(): float(self._up)}
        if family.kind == "gauge":
            return family.core(self._now) if self._up else {}
        return self._cumulated(family)

    def _cumulated(self, family: Family) -> Series:
        assert family.core is not None
        return _sum(self._gone.get(family.name, {}), family.core(self._now))


class Tracker:
    """Counts one request, from the outputs that its reader is given. Tokens of outputs that were merged, because the
    reader was slow, share the time that they took together."""

    __slots__ = ("_delta", "_metrics", "_open", "_params", "_reasons", "_seen", "_tokens")

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics, self._params, self._open = metrics, params, True
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._tokens = [0] * params.n
        self._seen = [0.0] * params.n  # when the newest token of each completion came
        self._reasons: list[str | None] = [None] * params.n

    @property
    def over(self) -> bool:
        """Its last output was shown, or it was ended otherwise."""
        return not self._open

    def output(self, output: RequestOutput) -> None:
        """Count what is new; each output must be shown once, in order."""
        if self._params.output_kind is RequestOutputKind.FINAL_ONLY:
            self._final(output)
        else:
            for completion in output.outputs:
                index, count = completion.index, len(completion.token_ids)
                new = count if self._delta else count - self._tokens[index]
                if new:
                    self._tokens[index] += new
                    self._came(index, new, output.metrics)
                self._reasons[index] = completion.finish_reason
        if output.finished and self._open:
            self._finish(output)

    def _came(self, index: int, new: int, times: RequestMetrics) -> None:
        """New tokens of a completion."""
        before, now = self._seen[index], times.last_token_time
        if before:
            self._metrics.between_tokens.observe((now - before) / new, new)
        else:
            if not any(self._seen):
                self._metrics.first_token.observe(times.first_token_time - times.arrival_time)
            if new > 1 and now > times.first_token_time:
                self._metrics.between_tokens.observe((now - times.first_token_time) / (new - 1), new - 1)
        self._seen[index] = now

    def _final(self, output: RequestOutput) -> None:
        """Only the first and the last token's times are known; completions of one request run together."""
        times = output.metrics
        self._tokens = [len(completion.token_ids) for completion in output.outputs]
        self._reasons = [completion.finish_reason for completion in output.outputs]
        if times.first_token_time:
            self._metrics.first_token.observe(times.first_token_time - times.arrival_time)
        if (longest := max(self._tokens)) > 1:
            pace = (times.last_token_time - times.first_token_time) / (longest - 1)
            self._metrics.between_tokens.observe(pace, sum(count - 1 for count in self._tokens if count))

    def _finish(self, output: RequestOutput) -> None:
        if all(reason in ("stop", "length", "repetition") for reason in self._reasons):
            prompt = len(output.prompt_token_ids)
            self._metrics.finished(
                Finished(output.metrics, self._params, prompt, output.num_cached_tokens, self._tokens)
            )
        self.end()

    def end(self, reason: str = "abort") -> None:
        """The request is over: completions without an end of their own ended for this reason, "abort" (nobody wants
        the rest) or "error" (the engine failed). Does nothing for one that is over."""
        if self._open:
            self._open = False
            self._metrics.ended()
            for own in self._reasons:
                self._metrics.completed(own or reason)

    def reject(self, reason: str) -> None:
        """The request was refused because of the load and never ran; as `Metrics.rejected`."""
        self._metrics.rejected(reason)
        self.drop()

    def drop(self) -> None:
        """The request cannot run, because of a mistake in it: it is no request of the engine's."""
        self._open = False


class _Processes(Collector):
    """CPU, memory and files of several processes."""

    def __init__(self, processes: Callable[[], Mapping[str, int]]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for name, pid in self._processes().items():
            for metric in prometheus.ProcessCollector(pid=functools.partial(int, pid), registry=None).collect():
                kept = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                kept.samples += [sample._replace(labels={"process": name}) for sample in metric.samples]
        yield from found.values()


def text_of(registry: prometheus.CollectorRegistry, openmetrics: bool) -> tuple[bytes, str]:
    """All metrics of a registry, and the content type."""
    if openmetrics:
        # Any other way of escaping replaces the colon of vLLM's names.
        text = exposition.generate_latest(registry, escaping=exposition.ALLOWUTF8)
        return text, exposition.CONTENT_TYPE_LATEST
    return prometheus.generate_latest(registry), prometheus.CONTENT_TYPE_PLAIN_0_0_4


def _sum(first: Series, *others: Series) -> Series:
    """All together, by their labels."""
    if not others:
        return first
    total = dict(first)
    for series in others:
        for labels, value in series.items():
            before = total.get(labels)
            total[labels] = value if before is None else value + before  # type: ignore[operator]
    return total


def _metric(family: Family, series: Series) -> Metric:
    name = "graphllm_" + family.name
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
        for labels, value in series.items():
            assert isinstance(value, Distribution)
            histogram.add_metric(labels, _cumulative(value), value.total)
        return histogram
    made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = made(name, family.help, labels=family.labels)
    for labels, value in series.items():
        assert not isinstance(value, Distribution)
        metric.add_metric(labels, value)
    return metric


def _cumulative(values: Distribution) -> list[tuple[str, float]]:
    """Bounds as text, and how many values are up to each."""
    return [(prometheus.utils.floatToGoString(bound), float(count)) for bound, count in values.cumulative()]


def _renamed(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """The same samples under another name, with more labels."""
    other = Metric(name, metric.documentation, metric.type)
    other.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name), labels={**labels, **sample.labels})
        for sample in metric.samples
    ]
    return other
