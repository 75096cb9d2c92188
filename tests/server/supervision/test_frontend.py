"""Flags of vLLM's server on a live one: templates, roles, usage, admins' keys, CORS, rates, the path at a proxy."""

from __future__ import annotations

import gzip
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphllm.embedded import MODEL_DIR
from tests.server.live import Served
from tests.server.sdk import MODEL, SUM, tokenizer
from tests.waiting import PATIENCE

TEMPLATE = "{% for m in messages %}[{{ m.role }}{{ mood }}]{{ m.content }}{% endfor %}"
ASK = {"model": MODEL, "messages": SUM, "max_tokens": 8, "temperature": 0, "return_prompt_text": True}
BEARER = {"authorization": "Bearer k"}
ADMIN = {"authorization": "Bearer root"}


@pytest.fixture(scope="module")
def flagged(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As a vLLM user starts it, with values that are the usual ones among them."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    folder = tmp_path_factory.mktemp("flagged")
    server = Served(
        folder / "log", "--artifact", embedded_artifact,
        "--chat-template", template, "--default-chat-template-kwargs", '{"mood": "!"}', "--trust-request-chat-template",
        "--response-role", "bot", "--enable-force-include-usage", "--return-tokens-as-token-ids", "--strict-fields",
        "--api-key", "k", "--admin-api-key", "root", "--root-path", "/models/chat/",
        "--allowed-origins", '["https://a.example"]', "--allowed-methods", '["POST"]', "--allow-credentials",
        "--rate-limit-token", "60", "--rate-limit-interval", "3600", "--disable-access-log-for-endpoints", "/version",
        "--served-model-name", MODEL, "--served-model-name", "other",
        # What is done anyway, or the only value there is.
        "--enable-auto-tool-choice", "--enable-request-id-headers", "--enable-prompt-tokens-details",
        "--enable-server-load-tracking", "--max-log-len", "100", "--uvicorn-log-level", "info",
        "--chat-template-content-format", "auto", "--tool-call-parser", "llama3_json", "--tensor-parallel-size", "1",
        "--h11-max-header-count", "256", "--no-enable-log-outputs",
        cwd=folder,
    )  # fmt: skip
    yield server.wait_ready()
    assert server.stop() == 0, server.log.read_text()


def _post(server: Served, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    return server.post(path, body, **{**BEARER, **headers})


def _chat(server: Served, **fields: Any) -> tuple[int, Any]:
    return _post(server, "/v1/chat/completions", {**ASK, **fields}, authorization="Bearer root")[:2]


def test_the_template_and_its_variables(flagged: Served) -> None:
    assert _chat(flagged)[1]["prompt_text"] == f"[user!]{SUM[0]['content']}"
    assert _chat(flagged, chat_template_kwargs={"mood": "?"})[1]["prompt_text"] == f"[user?]{SUM[0]['content']}"


def test_the_role_and_the_usage_of_answers(flagged: Served) -> None:
    assert _chat(flagged)[1]["choices"][0]["message"]["role"] == "bot"
    request = urllib.request.Request(
        f"{flagged.url}/v1/chat/completions", json.dumps({**ASK, "stream": True}).encode(),
        {"content-type": "application/json", **ADMIN},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert chunks[0]["choices"][0]["delta"]["role"] == "bot"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"] > 0) == ([], True)
    entries = _chat(flagged, logprobs=True)[1]["choices"][0]["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") for entry in entries)


def test_ignored_fields_are_refused_when_asked_to(flagged: Served) -> None:
    status, body = _chat(flagged, store=True)
    assert (status, body["error"]["param"]) == (400, "store")
    assert "start without --strict-fields" in body["error"]["message"]


# --- templates of requests


def test_a_template_of_a_request(flagged: Served) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}{{ bos_token }}"
    expected = tokenizer().apply_chat_template(SUM, chat_template=template, tokenize=False)
    assert _chat(flagged, chat_template=template)[1]["prompt_text"] == expected
    status, found, _ = _post(flagged, "/tokenize", {"messages": SUM, "chat_template": template}, **ADMIN)
    assert (status, found["tokens"]) == (200, tokenizer()(expected, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 2 s"),
        ("{{ 'a' * 9999999999 }}", "takes more than 256 MiB"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "256 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages", "line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('I will not') }}", "I will not"),
        ("{{ 'word ' * 100000 }}", "prompt has"),
    ],
)
def test_templates_that_mean_harm(template: str, message: str, flagged: Served) -> None:
    """They are refused, and others are answered meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        asked, answers = pool.submit(_chat, flagged, chat_template=template), 0
        while not asked.done():
            assert flagged.get("/ping")[0] == 200
            answers += 1
        status, body = asked.result()
    assert status == 400
    assert message in body["error"]["message"]
    assert answers > 3 or "takes more than 2 s" not in message


def test_profiles(flagged: Served) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert _post(flagged, path, {})[0] == 403
    status, body, _ = _post(flagged, "/stop_profile", {}, **ADMIN)
    assert (status, "there is no profile; start_profile begins one" in body["error"]["message"]) == (400, True)
    assert _post(flagged, "/start_profile", {}, **ADMIN)[:2] == (200, {"started": True})
    assert _post(flagged, "/start_profile", {}, **ADMIN)[0] == 400
    tokens = _chat(flagged)[1]["usage"]["completion_tokens"]
    status, body, _ = _post(flagged, "/stop_profile", {}, **ADMIN)
    (trace,) = body["traces"]
    assert trace.startswith("profile/rank0-")
    events = json.loads(gzip.decompress((flagged.log.parent / trace).read_bytes()))["traceEvents"]
    assert len([e for e in events if e["name"] == "1 tokens of 1 sequences"]) >= tokens - 1


# --- who may ask


def test_admins_alone(flagged: Served) -> None:
    for path in ("/server_info", "/tokenizer_info"):
        assert flagged.get(path)[0] == 403
    assert _post(flagged, "/reset_prefix_cache", {})[0] == 403
    assert _post(flagged, "/reset_prefix_cache", {}, **ADMIN)[:2] == (200, {"reset": True})
    for path, known in (("/server_info", f'"models":["{MODEL}","other"]'), ("/tokenizer_info", "[{{ m.role }}")):
        request = urllib.request.Request(flagged.url + path, headers=ADMIN)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read().decode()
        assert known in text
        assert str(MODEL_DIR) not in text
        assert "/tmp" not in text


def test_requests_are_aborted_by_their_ids(flagged: Served) -> None:
    found: list[tuple[int, Any]] = []

    def ask() -> None:
        body = {
            "prompt": "Count:",
            "max_tokens": 900,
            "ignore_eos": True,
            "request_id": "endless",
            "n": 2,
            "temperature": 1,
        }
        found.append(_post(flagged, "/v1/completions", body, **ADMIN)[:2])

    thread = threading.Thread(target=ask)
    thread.start()
    ids = {"request_ids": ["endless", "unknown"]}
    aborted = flagged.wait(lambda: _post(flagged, "/abort_requests", ids, **ADMIN)[1]["aborted"])
    thread.join(PATIENCE)
    ((status, body),) = found
    assert (aborted, status) == (1, 200)
    assert [choice["finish_reason"] for choice in body["choices"]] == ["abort", "abort"]
    assert _post(flagged, "/abort_requests", {"request_ids": ["endless"]}, **ADMIN)[1] == {"aborted": 0}


def test_pages_of_other_hosts(flagged: Served) -> None:
    def allowed(origin: str, method: str) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"{flagged.url}/v1/chat/completions", method="OPTIONS",
            headers={"origin": origin, "access-control-request-method": method},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.headers

    status, headers = allowed("https://a.example", "POST")
    assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert headers["access-control-allow-credentials"] == "true"
    assert allowed("https://a.example", "DELETE")[0] == 400
    assert allowed("https://b.example", "POST")[0] == 400


def test_the_path_at_a_proxy(flagged: Served) -> None:
    assert flagged.get("/models/chat/ping")[0] == flagged.get("/ping")[0] == 200
    status, body, _ = _post(flagged, "/models/chat/v1/chat/completions", {**ASK, "model": "other"}, **ADMIN)
    assert (status, body["model"]) == (200, "other")
    assert flagged.get("/models/chat/v1/models")[0] == 401
    assert "/models/chat/openapi.json" in flagged.get("/docs")[1]


def test_lines_of_the_log(flagged: Served) -> None:
    assert flagged.get("/version")[0] == 401
    assert flagged.get("/load")[0] == 401
    log = flagged.logged("GET /load 401")
    assert "GET /version" not in log


def test_rates(flagged: Served) -> None:
    """Last: the bucket of the key is empty then; the admin's key has no bucket."""
    answers = [_post(flagged, "/tokenize", {"prompt": "x"}) for _ in range(70)]
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses == sorted(statuses)
    assert 50 <= statuses.count(200) <= 60
    _, body, headers = answers[-1]
    assert body["error"]["message"].startswith("too many requests: send the next one in")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert flagged.get("/ping")[0] == 200
    assert _post(flagged, "/tokenize", {"prompt": "x"}, **ADMIN)[0] == 200


def test_flags_that_are_refused(cli: Callable[..., Any], embedded_artifact: Path) -> None:
    for flags, message in [
        (("--ssl-ciphers", "AES"), "ssl_ciphers is 'AES': ciphers are OpenSSL's defaults"),
        (("--lora-modules", "a=b"), "lora-modules: adapters are served with --enable-lora"),
        (("--grpc-port", "5"), "grpc_port is 5: gRPC is not served"),
        (("--chat-template", "/no/where"), "chat-template is '/no/where': no file that can be read"),
        (("--chat-template", "{{ x"), "chat template: line 1"),
        (("--default-chat-template-kwargs", "[]"), "default-chat-template-kwargs is '[]': give a JSON object"),
        (("--root-path", "a b"), "root-path is 'a b'"),
        (("--rate-limit-token", "0"), "rate-limit-token is 0"),
        (("--admin-api-key", ""), "admin-api-key is empty"),
    ]:
        done = cli("serve", "--artifact", embedded_artifact, "--port", "0", *flags)
        assert done.code == 2, (flags, done.err)
        assert message in done.err
        assert "Traceback" not in done.err
