"""A generator and an embedder in one server (`graphllm serve --also`)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from graphllm.embedded import ADAPTERS, EMBEDDER_DIR
from tests.artifacts import artifact_of
from tests.server.live import Served
from tests.waiting import PATIENCE

EMBEDDER = json.dumps({"model": "embedded-embedder", "served_model_name": "small", "backend": "eager"})
TEXTS = ["A cat sleeps.", "A dog runs over the road."]


@pytest.fixture(scope="module")
def both(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the embedded models, of which the second makes vectors."""
    place = tmp_path_factory.mktemp("both")
    artifact_of(EMBEDDER_DIR, backend="eager")
    options = ("--artifact", embedded_artifact, "--also", EMBEDDER, "--admin-api-key", "boss", "--restart-engine")
    server = Served(place / "log", *options)
    yield server.wait_ready()
    assert server.stop() == 0, server.log.read_text()


def engines(server: Served) -> list[int]:
    """Processes of its engines."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(c) for c in children if b"loading.core.core_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def expected(text: str) -> np.ndarray:
    """The mean of the hidden states by transformers, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDER_DIR)
    model = transformers.AutoModel.from_pretrained(EMBEDDER_DIR, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return (states / states.norm()).numpy()


def test_each_model_by_its_name(both: Served) -> None:
    client = openai.OpenAI(base_url=f"{both.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["graphllm-embedded", "small"]
    assert client.models.retrieve("small").root == "small"
    for vector, text in zip(client.embeddings.create(model="small", input=TEXTS).data, TEXTS, strict=True):
        assert float(np.array(vector.embedding) @ expected(text)) > 0.999  # the embedder is in bf16
    messages: Any = [{"role": "user", "content": "Hi"}]
    reply = client.chat.completions.create(model="graphllm-embedded", messages=messages, max_tokens=4)
    assert reply.model == "graphllm-embedded"
    assert reply.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="vectors"):
        client.chat.completions.create(model="small", messages=messages)
    with pytest.raises(openai.BadRequestError, match="generates text"):
        client.embeddings.create(model="graphllm-embedded", input=TEXTS)
    with pytest.raises(openai.NotFoundError, match="'nobody'"):
        client.embeddings.create(model="nobody", input=TEXTS)


def test_without_a_name_the_route_says_which(both: Served) -> None:
    status, found, _ = both.post("/v1/embeddings", {"input": "A cat"})
    assert (status, found["model"]) == (200, "small")
    status, found, _ = both.post("/v1/completions", {"prompt": "A cat", "max_tokens": 2})
    assert (status, found["model"]) == (200, "graphllm-embedded")
    status, found, _ = both.post("/score", {"text_1": "A cat", "text_2": "A cat"})
    assert status == 200
    assert found["data"][0]["score"] == pytest.approx(1, abs=1e-3)
    long = " ".join(["cat"] * 20_000)  # a body that is read in a thread
    status, found, _ = both.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 8, "model": "small"})
    assert status == 200
    assert found["usage"]["prompt_tokens"] == 8
    assert both.post("/v1/embeddings", b"{" * 10)[0] == 400


def test_tokenizer_and_admin_of_the_named_one(both: Served) -> None:
    lengths = {name: json.loads(both.get(f"/v1/models/{name}")[1])["max_model_len"] for name in ("small",)}
    found = both.post("/tokenize", {"model": "small", "prompt": "A cat"})[1]
    assert found["max_model_len"] == lengths["small"] != both.post("/tokenize", {"prompt": "A cat"})[1]["max_model_len"]
    for query, name in (("", "graphllm-embedded"), ("?model=small", "small")):
        request = urllib.request.Request(both.url + "/server_info" + query, headers={"authorization": "Bearer boss"})
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["models"] == [name]


def test_metrics_have_the_name_of_the_model(both: Served) -> None:
    both.post("/v1/embeddings", {"input": "A cat"})
    text = both.get("/metrics")[1]
    up = dict(re.findall(r'^graphllm_engine_up\{model_name="([^"]+)"\} (\S+)$', text, re.MULTILINE))
    assert up == {"graphllm-embedded": "1.0", "small": "1.0"}
    assert re.search(r'^graphllm_prompt_tokens_total\{model_name="small"\} [1-9]', text, re.MULTILINE)
    assert re.search(r'^vllm:num_requests_running\{engine="0",model_name="small"\} 0', text, re.MULTILINE)
    assert re.search(r'^graphllm_http_requests_total\{route="/v1/embeddings",status="200"\} [1-9]', text, re.MULTILINE)
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(families) == len(set(families))


@pytest.mark.thorough
def test_one_engine_is_brought_back_while_the_other_serves(both: Served) -> None:
    before = engines(both)
    assert len(before) == 2
    os.kill(before[1], signal.SIGKILL)
    _, told = both.wait(lambda: (found := both.get("/health/ready"))[0] == 503 and found)
    name = json.loads(told)["cause"].partition(":")[0]
    other, body = {
        "small": ("/v1/completions", {"prompt": "A", "max_tokens": 1}),
        "graphllm-embedded": ("/v1/embeddings", {"input": "A"}),
    }[name]
    assert both.post(other, body)[0] == 200
    both.wait_ready()
    assert both.post("/v1/embeddings", {"input": "A"})[0] == 200
    assert both.post("/v1/completions", {"prompt": "A", "max_tokens": 1})[0] == 200
    assert len(set(engines(both)) - set(before)) == 1


@pytest.mark.slow
def test_adapters_are_beside_the_model_that_has_them(tmp_path: Path) -> None:
    """Here the first model makes vectors, and the second one has adapters."""
    name, folder = next(iter(ADAPTERS.items()))
    generator = json.dumps({"model": "embedded", "served_model_name": "chat", "enable_lora": True, "backend": "eager"})
    options = ("embedded-embedder", "--backend", "eager", "--also", generator, "--lora-dir", folder.parent)
    server = Served(tmp_path / "log", *options)
    try:
        server.wait_ready()
        assert server.post("/v1/embeddings", {"input": "A cat"})[1]["model"] == "embedded-embedder"
        load = urllib.request.Request(
            server.url + "/v1/load_lora_adapter",
            json.dumps({"lora_name": name, "lora_path": str(folder)}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(load) as response:
            assert b"added" in response.read()
        cards = {card["id"]: card["parent"] for card in json.loads(server.get("/v1/models")[1])["data"]}
        assert cards == {"embedded-embedder": None, "chat": None, name: "chat"}
        found = server.post("/v1/completions", {"model": name, "prompt": "A cat", "max_tokens": 2})
        assert (found[0], found[1]["model"]) == (200, name)
    finally:
        assert server.stop() == 0, server.log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--also", '{"served_model_name": "x"}'], "JSON with model"),
        (["--also", '{"model": "embedded-embedder", "no_such": 1}'], "no_such"),
        (["--also", "embedded-embedder", "--also", "embedded-embedder"], "given twice"),
        (["--also", "embedded-embedder", "--api-server-count", "2"], "one process speaks HTTP for several models"),
    ],
)
def test_refused(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "graphllm.cli", "serve", "--port", "0", *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode != 0
    assert message in found.stderr
