"""Fuzzing a live server: schemathesis over its OpenAPI document, and properties where the document says little."""

from __future__ import annotations

import json
import socket
import time
import timeit
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from tests.server.hostile import HARD, MESSAGES, POSTS, VALID, mutated, shorten
from tests.server.live import Served
from tests.tiers import draws
from tests.waiting import PATIENCE

LONGEST = 2100  # characters of a message
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    response_headers_conformance, negative_data_rejection, unsupported_method, allow_header_conformance,
]  # fmt: skip
REPEATABLE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Fuzzed:
    """The server that is fuzzed, and what it said."""

    server: Served
    document: dict[str, Any]
    client: httpx.Client
    answers: Counter[int] = field(default_factory=Counter)

    def post(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        """The answer, which is of the right form whatever it is."""
        answer = self.client.post(path, content=body, headers={"content-type": "application/json", **headers})
        self.note(path, answer.status_code, answer.headers.get("content-type", ""), answer.text)
        return answer

    def note(self, path: str, status: int, kind: str, text: str) -> None:
        self.answers[status] += 1
        assert status < 500, text
        if status >= 400:
            assert kind == "application/json"
            check_error(path, status, json.loads(text))
        elif kind.startswith("text/event-stream"):
            check_events(path, text)
        elif kind == "application/json":
            json.loads(text, parse_constant=pytest.fail)


def check_error(path: str, status: int, body: Any) -> None:
    if path.startswith(MESSAGES):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["param"], str | None)
        assert isinstance(body["error"]["code"], str | None)
    assert body["error"]["type"].endswith("_error")
    message = body["error"]["message"]
    assert message.strip()
    assert len(message) < LONGEST
    assert status != 400 or ": " in message  # what is wrong, and what to do


def check_events(path: str, text: str) -> None:
    """A stream has its end, and none has an error: what is wrong with a request shows before it begins."""
    assert text.endswith("\n\n")
    blocks = [block.split("\n") for block in text[:-2].split("\n\n")]
    data = [line.removeprefix("data: ") for block in blocks for line in block if line.startswith("data: ")]
    assert len(data) == len(blocks)
    if path.startswith((MESSAGES, "/v1/responses")):
        events = [json.loads(d) for d in data]
        assert [f"event: {e['type']}" for e in events] == [block[0] for block in blocks]
        last = events[-1]["type"]
        assert last in ("message_stop", "response.completed", "response.incomplete"), events[-1]
    else:
        assert data.pop() == "[DONE]"
        assert not [d for d in data if "error" in json.loads(d)]


@pytest.fixture(scope="module")
def fuzzed(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    """A server of its own: it must be as it was at the end, engine and all, and have nothing bad in its log."""
    server = Served(tmp_path_factory.mktemp("fuzzed") / "log", "--artifact", embedded_artifact).wait_ready()
    try:
        engine = server.engine_pid
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            found = Fuzzed(server, client.get("/openapi.json").json(), client)
            yield found
            assert server.get("/health/ready")[0] == 200
            assert server.engine_pid == engine
            server.idle()
            assert client.get("/load").json() == {"server_load": 0}
        print(f"answers: {dict(sorted(found.answers.items()))}")
        log = server.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
        assert " ERROR " not in log
    finally:
        ended = server.stop()
    assert ended == 0


def repeat(check: Any, strategy: Any, examples: int) -> None:
    settings(REPEATABLE, max_examples=examples)(given(strategy)(check))()


# --- the document


def test_the_document_is_valid(fuzzed: Fuzzed) -> None:
    document = fuzzed.document
    OPENAPI_31_VALIDATOR.validate(document)
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["tags"], where
            assert operation.get("description"), where
            assert "422" not in operation["responses"], where  # a mistake in a body is a 400
            assert ("400" in operation["responses"]) or "requestBody" not in operation, where


def operations(document: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(document, config=schemathesis.Config.from_dict({}))
    return [found.ok() for found in schema.get_all_operations()]


def check_case(fuzzed: Fuzzed) -> Any:
    """Sends a case of schemathesis; what comes must be what the document says, one of its statuses in so many words."""

    def check(case: Any) -> None:
        shorten(case.path, case.body)
        answer = case.call(base_url=fuzzed.server.url, timeout=PATIENCE)
        kind = answer.headers.get("content-type", [""])[0]
        fuzzed.note(case.path, answer.status_code, kind, answer.text)
        case.validate_response(answer, checks=CHECKS)
        documented = fuzzed.document["paths"][case.path].get(case.method.lower(), {"responses": ["405"]})["responses"]
        assert str(answer.status_code) in documented or answer.status_code == 405

    return check


def fuzz(fuzzed: Fuzzed, subtests: Any, examples: int, coverage: bool) -> None:
    for operation in operations(json.loads(json.dumps(fuzzed.document))):
        modes = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]
        with subtests.test(operation=operation.label):
            repeat(check_case(fuzzed), st.one_of(modes), examples)
        if coverage:  # the edges of every schema, each method, what is missing and what is too much
            config = HypothesisTestConfig(operation.schema.config, [HypothesisTestMode.COVERAGE], REPEATABLE)
            with subtests.test(operation=operation.label, coverage=True):
                create_test(operation=operation, test_func=check_case(fuzzed), config=config)()


def test_every_operation(fuzzed: Fuzzed, subtests: pytest.Subtests) -> None:
    fuzz(fuzzed, subtests, examples=draws(3, 40), coverage=False)


@pytest.mark.slow
def test_every_operation_at_length(fuzzed: Fuzzed, subtests: pytest.Subtests) -> None:
    fuzz(fuzzed, subtests, examples=200, coverage=True)


# --- bodies


def test_valid_bodies(fuzzed: Fuzzed) -> None:
    """Otherwise what is made of them would show little."""
    for path, body in VALID:
        answer = fuzzed.post(path, json.dumps(shorten(path, body)).encode())
        assert answer.status_code == 200, (path, body, answer.text)


def check_mutated(fuzzed: Fuzzed) -> Any:
    def check(request: tuple[str, bytes]) -> None:
        assert fuzzed.post(*request).status_code in (200, 400, 404)

    return check


def test_bodies_with_mistakes(fuzzed: Fuzzed) -> None:
    repeat(check_mutated(fuzzed), mutated(), draws(100, 300))


@pytest.mark.slow
def test_bodies_with_mistakes_at_length(fuzzed: Fuzzed) -> None:
    repeat(check_mutated(fuzzed), mutated(), 6000)


def test_huge_numbers(fuzzed: Fuzzed) -> None:
    """In every field that takes a number; a core has none of more than 64 bits, and some arrays have 32."""
    schemas = fuzzed.document["components"]["schemas"]
    for path, body in [VALID[i] for i in (0, 6, 9, 11)][: draws(1, 4)]:
        reference = fuzzed.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"][
            "$ref"
        ]
        for name, schema in schemas[reference.rpartition("/")[2]]["properties"].items():
            types = {option.get("type") for option in [schema, *schema.get("anyOf", ())]}
            for number in (2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**31), -(2**63), 1e300, 1e-300):
                if types & {"integer", "number"} and name != "n":
                    whole = shorten(path, {**body, "n": None, name: number})
                    assert fuzzed.post(path, json.dumps(whole).encode()).status_code in (200, 400), (name, number)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"self": 1}},
        {"chat_template_kwargs": {"range": 1, "namespace": 2, "loop": 3, "raise_exception": 4, "messages ": 5}},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"\u0665": 1}},
        {"logit_bias": {"5": 10**30}},
        {"x" * 5000: 1},
        {f"x{i}": i for i in range(5000)},
        {"stop": ["x" * 500] * 60, "temperature": -1},
        {"messages": [{"role": "user", "content": "x", "self": 1, "name": None}]},
    ],
)
def test_what_once_broke(fuzzed: Fuzzed, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
    assert fuzzed.post("/v1/chat/completions", json.dumps(body).encode()).status_code in (200, 400)


_TYPES = st.sampled_from(["application/json", "", "text/plain", "application/json; charset=utf-16", "a/b/c", "*/*"])
_JSON = st.recursive(
    st.sampled_from([b"1", b"-", b"1e400", b"NaN", b'"\\ud800"', b'"\xff"', b"null", b'"a"', b"", b"{", b"]"]),
    lambda inner: (
        st.lists(inner).map(lambda parts: b"[" + b",".join(parts) + b"]")
        | st.lists(inner).map(lambda parts: b"{" + b",".join(b'"prompt":' + part for part in parts) + b"}")
    ),
    max_leaves=6,
)


def test_any_bytes_as_a_body(fuzzed: Fuzzed) -> None:
    def check(request: tuple[str, bytes, str]) -> None:
        path, body, kind = request
        assert fuzzed.post(path, body, **{"content-type": kind}).status_code in (200, 400)

    repeat(check, st.tuples(st.sampled_from(POSTS), st.binary(max_size=200) | _JSON, _TYPES), draws(50, 150))


@given(st.lists(st.tuples(st.binary(max_size=30), st.binary(max_size=60)), max_size=4), st.binary(max_size=40))
@example([(b"authorization", b"Bearer \xff"), (b"x-request-id", b"\x01\r\nx")], b"/v1/models/%ff")
@example([(b"host", b"["), (b"accept", b"application/openmetrics-text;\xff")], b"/nothing")
@example([(b"content-length", b"9" * 60)], b"/tokenize")
@example([(b"transfer-encoding", b"chunked"), (b"content-length", b"5")], b"/tokenize")
@settings(REPEATABLE, max_examples=draws(33, 100))
def test_any_bytes_as_a_head(fuzzed: Fuzzed, headers: list[tuple[bytes, bytes]], target: bytes) -> None:
    """It is answered, or the connection is closed; what follows a whole head is never waited for longer than that."""
    lines = [b"GET " + target + b" HTTP/1.1", b"connection: close", *(name + b": " + value for name, value in headers)]
    with fuzzed.server.connect() as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    if answer:
        status = int(answer.split(b" ", 2)[1])
        fuzzed.answers[status] += 1
        assert status < 500, answer


# --- tokens


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def test_tokens_are_the_text(fuzzed: Fuzzed) -> None:
    def check(text: str) -> None:
        fields = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
        found = fuzzed.post("/tokenize", json.dumps(fields).encode()).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        back = fuzzed.post("/detokenize", json.dumps({"tokens": found["tokens"]}).encode()).json()
        assert back == {"prompt": text}
        if text.isascii():
            assert "".join(found["token_strs"]) == text

    repeat(check, _TEXT, draws(30, 100))


def test_any_tokens_are_a_text(fuzzed: Fuzzed) -> None:
    def check(tokens: list[int]) -> None:
        answer = fuzzed.post("/detokenize", json.dumps({"tokens": tokens}).encode())
        assert answer.status_code == (200 if all(0 <= token < 4096 for token in tokens) else 400)

    repeat(check, st.lists(st.integers(-1, 4097) | st.integers(), max_size=8), draws(20, 60))


# --- what is hard


def post_beside_others(fuzzed: Fuzzed, path: str, body: Any) -> None:
    """Meanwhile somebody else asks again and again, and gets answers where it lasts as long as thousands of those."""

    def ask() -> None:
        assert fuzzed.server.get("/health/live")[0] == 200

    alone = min(timeit.repeat(ask, number=1, repeat=9))
    with ThreadPoolExecutor(1) as pool:
        posting, begun, answers = pool.submit(fuzzed.post, path, json.dumps(body).encode()), time.monotonic(), 0
        while not posting.done():
            ask()
            answers += 1
        lasted = time.monotonic() - begun
        posting.result()
    assert answers > 9 or lasted < 2000 * alone


@pytest.mark.parametrize("name", HARD)
def test_hard_constraints(fuzzed: Fuzzed, name: str) -> None:
    body = {"prompt": "x", "max_tokens": 2, "structured_outputs": HARD[name]}
    post_beside_others(fuzzed, "/v1/completions", body)


def test_long_texts(fuzzed: Fuzzed) -> None:
    """Megabytes to read and to tokenize, which others do not notice."""
    text = "hello world, " * 80_000
    turn = {"role": "user", "content": text}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [turn]}),
        ("/detokenize", {"tokens": [5] * 300_000}),
        (f"{MESSAGES}/count_tokens", {"messages": [turn]}),
        (MESSAGES, {"messages": [turn], "max_tokens": 2}),
        ("/v1/responses", {"input": text}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [5] * 300_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ("/v1/chat/completions", [[]] * 500_000),
    ):
        post_beside_others(fuzzed, path, body)
