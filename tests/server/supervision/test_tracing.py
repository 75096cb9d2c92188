"""Spans of requests, as a collector of OpenTelemetry's receives them."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RequestOutputKind
from tests.server.live import Served

PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-01"}
THREE = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


def _installed(protocol: str) -> bool:
    try:
        return importlib.util.find_spec(f"opentelemetry.exporter.otlp.proto.{protocol}") is not None
    except ModuleNotFoundError:
        return False


needs_http = pytest.mark.skipif(not _installed("http"), reason="opentelemetry is not installed")
needs_grpc = pytest.mark.skipif(not _installed("grpc"), reason="opentelemetry's gRPC is not installed")


def _spans(bodies: list[bytes]) -> list[tuple[Any, dict[str, Any]]]:
    """Each span with its attributes."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return [
        (span, {a.key: a.value for a in span.attributes})
        for data in bodies
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and the bodies that it got."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()


@pytest.mark.skipif(_installed("http"), reason="opentelemetry is installed")
def test_what_is_missing(process: Callable[..., Any], embedded_artifact: Path) -> None:
    done = process(
        "serve", "--artifact", embedded_artifact, "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"
    )
    assert done.code == 2
    assert "are not installed; run: pip install 'graphllm[otel]'" in done.err


@pytest.mark.skipif(_installed("grpc"), reason="opentelemetry's gRPC is installed")
def test_what_is_missing_for_grpc(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"for grpc are not installed; run: pip install 'graphllm\[otel-grpc\]'"):
        LLM(checkpoint, otlp_traces_endpoint="http://localhost:4317")


def test_a_protocol_that_there_is_not(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': use http/protobuf or grpc"):
        LLM(checkpoint, otlp_traces_endpoint="http://localhost:4317")


@needs_http
def test_offline(checkpoint: Path, eager_artifact: Path, collector: tuple[str, list[bytes]]) -> None:
    """Of LLM, of an engine that is stepped, and of an asynchronous one; whatever their outputs hold."""
    endpoint, bodies = collector
    options: Any = {"artifact": str(eager_artifact), "otlp_traces_endpoint": endpoint}
    with LLM(checkpoint, **options) as llm:
        llm.generate(["a", "b c"], THREE, use_tqdm=False)
    delta = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine = LLMEngine.from_engine_args(EngineArgs(checkpoint, **options))
    engine.add_request("stepped", "a", delta, trace_headers=HEADERS)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()

    async def one() -> None:
        llm = AsyncLLM.from_engine_args(EngineArgs(checkpoint, **options))
        async for _ in llm.generate("a", delta, "streamed", trace_headers=HEADERS):
            pass
        await llm.close()

    asyncio.run(one())
    found = [
        (told["gen_ai.request.id"].string_value, told["gen_ai.usage.completion_tokens"].int_value, span.trace_id.hex())
        for span, told in _spans(bodies)
    ]
    assert [(id, tokens) for id, tokens, _ in found] == [("0", 3), ("1", 3), ("stepped", 4), ("streamed", 4)]
    assert [trace == PARENT for *_, trace in found] == [False, False, True, True]


@needs_grpc
def test_grpc(checkpoint: Path, eager_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    bodies: list[bytes] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            bodies.append(request.SerializeToString())
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with LLM(checkpoint, artifact=str(eager_artifact), otlp_traces_endpoint=f"http://127.0.0.1:{port}") as llm:
        llm.generate(["a"], THREE, use_tqdm=False)
    server.stop(None)
    assert [told["gen_ai.usage.completion_tokens"].int_value for _, told in _spans(bodies)] == [3]


@needs_http
def test_a_span(serve: Callable[..., Served], collector: tuple[str, list[bytes]]) -> None:
    endpoint, bodies = collector
    server = serve("--otlp-traces-endpoint", endpoint).wait_ready()
    body = {"prompt": ["a", "b c"], "max_tokens": 3, "ignore_eos": True, "request_id": "traced"}
    assert server.post("/v1/completions", body, **HEADERS)[0] == 200
    assert server.stop() == 0
    spans = _spans(bodies)
    assert [(span.name, span.trace_id.hex()) for span, _ in spans] == [("llm_request", PARENT)] * 2
    for span, told in spans:
        assert told["gen_ai.request.id"].string_value == "traced"
        assert told["gen_ai.request.max_tokens"].int_value == told["gen_ai.usage.completion_tokens"].int_value == 3
        latency = [told[f"gen_ai.latency.{name}"].double_value for name in ("time_to_first_token", "e2e")]
        assert 0 < latency[0] <= latency[1] < 60
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
