"""A span for each request, for OpenTelemetry, with vLLM's names of attributes. What sends them is an extra."""

from __future__ import annotations

import time

from graphllm.config import ConfigError
from graphllm.config.sampling import SamplingParams
from graphllm.engine.outputs import RequestOutput


class Tracing:
    """Sends spans to a collector, in the background. endpoint: its URL, for protobuf over HTTP, such as
    http://localhost:4318/v1/traces. Raises ConfigError where opentelemetry is not installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as missing:
            raise ConfigError(
                f"otlp-traces-endpoint is {endpoint!r:.80}: opentelemetry is not installed; run: pip install "
                "'graphllm[otel]'"
            ) from missing
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp-traces-endpoint is {endpoint!r:.80}: give a URL, as http://HOST:4318/v1/traces")
        self._provider = TracerProvider(resource=Resource.create({"service.name": "graphllm"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
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
