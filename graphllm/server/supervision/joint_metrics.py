"""Metrics of a server that has several models: the metrics of each model under its name, and the HTTP metrics once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import prometheus_client as prometheus
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from graphllm.engine.requests.request import CoreStats
from graphllm.server.supervision.metrics import Metrics, text_of

# Counted before anything is known of a model.
_OF_HTTP = ("graphllm_http_", "graphllm_admission_rejections")


class JointMetrics(Collector):
    """http: what is counted of all requests. models: of each model, by its name, which its series have as the label
    model_name."""

    def __init__(self, http: Metrics, models: Mapping[str, Metrics]) -> None:
        self._http, self._models = http, models
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(self)
        self._registry.register(prometheus.ProcessCollector(registry=None))

    def render(self, stats: Sequence[Sequence[CoreStats | None]], openmetrics: bool) -> tuple[bytes, str]:
        """As `Metrics.render`. stats: of each model's cores."""
        for metrics, known in zip(self._models.values(), stats, strict=True):
            metrics.refresh(known)
        return text_of(self._registry, openmetrics)

    def collect(self) -> Iterator[Metric]:
        """For the registry: each family once."""
        found = {m.name: m for m in self._http.collect() if m.name.startswith(_OF_HTTP)}
        for name, metrics in self._models.items():
            for metric in metrics.collect():
                if metric.name.startswith(_OF_HTTP[0]):
                    continue
                kept = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                kept.samples += [s._replace(labels={"model_name": name, **s.labels}) for s in metric.samples]
        yield from found.values()
