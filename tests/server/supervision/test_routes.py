"""Routes of vLLM's beside those of OpenAI's API: each answers, or says why it is not served and what to do."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from graphllm.config.vllm.unserved import UNSERVED
from tests.server.live import Served
from tests.server.sdk import MODEL, STORY, SUM
from tests.waiting import PATIENCE

CHAT = {"messages": SUM, "max_tokens": 12, "temperature": 0}
SURFACE = (Path(__file__).parent / "vllm_routes.txt").read_text().splitlines()


def _ask(served: Served, method: str, path: str) -> tuple[int, Any]:
    data = b"{}" if method == "POST" else None
    request = urllib.request.Request(served.url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_every_route_is_served_or_explained(served: Served) -> None:
    for line in SURFACE:
        method, path = line.split()
        if method == "WEBSOCKET":
            assert path in UNSERVED
            continue
        status, text = _ask(served, method, path.replace("{response_id}", "resp_0"))
        if path in UNSERVED:
            assert (status, json.loads(text)["error"]["message"]) == (
                404,
                f"path: {path} is not served; {UNSERVED[path]}",
            )
        else:
            assert "nothing is at" not in text, line
            assert status != 405, line
            assert status < 500, (line, text)


def test_probes(served: Served) -> None:
    assert _ask(served, "GET", "/ready") == (200, '{"status":"ready"}')
    assert _ask(served, "GET", "/ping") == _ask(served, "POST", "/ping") == (200, '{"status":"ready"}')


def test_invocations(served: Served) -> None:
    chat, completion = served.post("/invocations", CHAT), served.post("/invocations", {"prompt": "x", "max_tokens": 2})
    assert chat[1]["choices"][0]["message"]["content"] == "12 + 7 = 19."
    assert (completion[0], completion[1]["object"]) == (200, "text_completion")
    status, body, _ = served.post("/invocations", {"input": "x"})
    assert (status, body["error"]["message"]) == (400, "prompt is missing: give it")
    assert served.post("/invocations", {**CHAT, "temperature": "hot"})[1]["error"]["param"] == "temperature"


def test_a_batch_of_chats(served: Served) -> None:
    status, body, _ = served.post("/v1/chat/completions/batch", {**CHAT, "messages": [SUM, STORY, SUM]})
    alone = served.post("/v1/chat/completions", {**CHAT, "messages": STORY})[1]
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == ["12 + 7 = 19.", alone["choices"][0]["message"]["content"], "12 + 7 = 19."]
    for wrong, message in (
        ({"stream": True}, "stream is True: not in a batch"),
        ({"messages": SUM}, "messages[0]"),
        ({"messages": [SUM, [*SUM, {"role": "user", "content": 5}]]}, f"messages[1][{len(SUM)}].content is 5"),
        ({"messages": [SUM, [{"role": "user", "content": "x " * 9000}]]}, "messages[1]: prompt has"),
        ({"messages": [SUM, SUM], "temperature": -1}, "temperature is -1"),
    ):
        status, body, _ = served.post("/v1/chat/completions/batch", {**CHAT, "messages": [SUM], **wrong})
        assert status == 400
        assert message in body["error"]["message"]
    long = {"prompt": ["a", "x " * 9000], "max_tokens": 1}
    status, body, _ = served.post("/v1/completions", long)
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert body["error"]["message"].startswith("prompt[1]: prompt has")
    assert served.post("/v1/completions", {**long, "stop_token_ids": [10**6]})[1]["error"]["param"] == "stop_token_ids"


def test_the_items_of_a_response(served: Served) -> None:
    given: Any = [
        {"role": "user", "content": "What is 12 + 7?"},
        {"role": "assistant", "content": "19"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
    ]
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        response = client.responses.create(model=MODEL, input=given, max_output_tokens=4)
        items = list(client.responses.input_items.list(response.id, order="asc", limit=2))  # two pages
        assert [item.content[0].text for item in items] == ["What is 12 + 7?", "19", "Sure?"]  # type: ignore[union-attr]
        newest = client.responses.input_items.list(response.id)
        assert [item.id for item in newest.data] == [item.id for item in reversed(items)]
        text = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
        assert client.responses.input_items.list(text.id).data[0].content[0].text == "Hello"  # type: ignore[union-attr]
    assert served.get("/v1/responses/resp_0/input_items")[0] == 404


@pytest.mark.parametrize("path", ["/server_info", "/tokenizer_info"])
def test_nobody_is_an_admin_without_a_key(path: str, served: Served) -> None:
    status, text = _ask(served, "GET", path)
    assert status == 403
    assert re.search("started without --admin-api-key", text)
