"""A span for each request, for OpenTelemetry, with vLLM's names of attributes. What sends them is an extra."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.requests.outputs import RequestOutput

# By protocol: the module of its exporter, and the extra that brings it.
_EXPORTERS = {
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel"),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "otel-grpc"),
}


def _exporter(endpoint: str) -> Any:
    """What sends spans there, by OpenTelemetry's own environment variables."""
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    said = next((name for name in variables if os.environ.get(name)), "")
    protocol = os.environ.get(said, "http/protobuf")
    if protocol not in _EXPORTERS:
        raise ConfigError(f"{said} is {protocol!r:.80}: use {' or '.join(_EXPORTERS)}")
    module, extra = _EXPORTERS[protocol]
    try:
        exporter = importlib.import_module(module).OTLPSpanExporter
        importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as missing:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r:.80}: opentelemetry's packages for {protocol} are not installed; "
            f"run: pip install 'graphllm[{extra}]'"
        ) from missing
    if not endpoint.startswith(("http://", "https://")):
        example = "http://HOST:4317" if protocol == "grpc" else "http://HOST:4318/v1/traces"
        raise ConfigError(f"otlp_traces_endpoint is {endpoint!r:.80}: give a URL, as {example}")
    return exporter(endpoint=endpoint)


class Tracing:
    """Sends spans to a collector, in the background. endpoint: its URL, such as http://localhost:4318/v1/traces. Raises
    ConfigError where opentelemetry is not installed."""

    def __init__(self, endpoint: str) -> None:
        exporter = _exporter(endpoint)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "graphllm"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("graphllm")

    def request(self, id: str, parent: str, params: SamplingParams, output: RequestOutput, tokens: int) -> None:
        """A prompt that is finished. parent: the header traceparent of its request, or "". tokens: of its output."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        times, elapsed = output.metrics, time.time() - time.monotonic()
        context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.latency.time_in_queue": max(0.0, times.first_scheduled_time - times.arrival_time),
            "gen_ai.latency.time_to_first_token": max(0.0, times.first_token_time - times.arrival_time),
            "gen_ai.latency.e2e": times.finished_time - times.arrival_time,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        span = self._tracer.start_span(
            "llm_request",
            context,
            SpanKind.SERVER,
            attributes,
            start_time=int(1e9 * (elapsed + times.arrival_time)),
        )
        span.end(int(1e9 * (elapsed + times.finished_time)))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class TracedRequest:
    """Follows the outputs of a request until it ends. headers: of the HTTP request, with traceparent or without."""

    def __init__(self, tracing: Tracing, id: str, params: SamplingParams, headers: Mapping[str, str] | None) -> None:
        self._tracing, self._id, self._params = tracing, id, params
        self._parent, self._tokens = (headers or {}).get("traceparent", ""), 0

    def take(self, output: RequestOutput) -> None:
        """Its next output; the span is sent with the last."""
        new = sum(len(completion.token_ids) for completion in output.outputs)
        self._tokens = new + (self._tokens if self._params.output_kind is RequestOutputKind.DELTA else 0)
        if output.finished:
            self._tracing.request(self._id, self._parent, self._params, output, self._tokens)
