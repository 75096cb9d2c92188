"""Spans of requests, as a collector of OpenTelemetry's receives them."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from live import Served

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"


def _installed() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(_installed(), reason="opentelemetry is installed")
def test_what_is_missing(process: Callable[..., Any], embedded_artifact: Path) -> None:
    done = process(
        "serve", "--artifact", embedded_artifact, "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"
    )
    assert done.code == 2
    assert "opentelemetry is not installed; run: pip install 'graphllm[otel]'" in done.err


@pytest.mark.skipif(not _installed(), reason="opentelemetry is not installed")
def test_a_span(serve: Callable[..., Served]) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    server = serve("--otlp-traces-endpoint", endpoint, OTEL_EXPORTER_OTLP_COMPRESSION="none").wait_ready()
    body = {"prompt": ["a", "b c"], "max_tokens": 3, "ignore_eos": True, "request_id": "traced"}
    assert server.post("/v1/completions", body, traceparent=f"00-{PARENT}-00f067aa0ba902b7-01")[0] == 200
    assert server.stop() == 0
    collector.shutdown()
    spans = [
        span
        for data in bodies
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [(span.name, span.trace_id.hex()) for span in spans] == [("llm_request", PARENT)] * 2
    for span in spans:
        told = {a.key: a.value for a in span.attributes}
        assert told["gen_ai.request.id"].string_value == "traced"
        assert told["gen_ai.request.max_tokens"].int_value == told["gen_ai.usage.completion_tokens"].int_value == 3
        latency = [told[f"gen_ai.latency.{name}"].double_value for name in ("time_to_first_token", "e2e")]
        assert 0 < latency[0] <= latency[1] < 60
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
