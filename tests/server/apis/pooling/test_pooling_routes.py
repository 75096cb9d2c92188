"""Routes for vectors against transformers' numbers: with OpenAI's client, and as vLLM's, Cohere's and Jina's clients
send them."""

from __future__ import annotations

import base64
import itertools
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.server.apis.pooling.vectors import TEXTS, embedding_of, read, score_of
from tests.server.live import Served


def _close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def client(embedder: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none")


def test_openai_client(client: openai.OpenAI, embedder: Served, embedder_folder: Path) -> None:
    """The client asks for base64 by itself."""
    made = client.embeddings.create(model="small", input=TEXTS)
    tokenizer, _ = read(embedder_folder, AutoModel)
    assert [d.index for d in made.data] == [0, 1, 2]
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(len(tokenizer(t).input_ids) for t in TEXTS)
    for data, text in zip(made.data, TEXTS, strict=True):
        _close(data.embedding, embedding_of(embedder_folder, text))
    plain = client.embeddings.create(model="small", input=TEXTS[0], encoding_format="float", user="u")
    _close(plain.data[0].embedding, embedding_of(embedder_folder, TEXTS[0]))
    short = client.embeddings.create(model="small", input=[[5, 6, 7], [8]], dimensions=16)
    for data, ids in zip(short.data, ([5, 6, 7], [8]), strict=True):
        _close(data.embedding, embedding_of(embedder_folder, ids, 16))
    assert [m.id for m in client.models.list()] == ["small"]


def test_embedding_fields(embedder: Served, embedder_folder: Path) -> None:
    tokenizer, _ = read(embedder_folder, AutoModel)

    def ask(**fields: Any) -> Any:
        status, body, _ = embedder.post("/v1/embeddings", {"input": TEXTS[2], **fields})
        assert status == 200, body
        return body["data"][0]["embedding"]

    ids = tokenizer(TEXTS[2]).input_ids
    _close(ask(truncate_prompt_tokens=4), embedding_of(embedder_folder, ids[:4]))
    _close(ask(prompt_name="query"), embedding_of(embedder_folder, "Find what answers this: " + TEXTS[2]))
    text = ask(encoding_format="base64", embed_dtype="float16", endianness="big")
    halves = np.frombuffer(base64.b64decode(text), ">f2").astype(np.float32)
    np.testing.assert_allclose(halves, embedding_of(embedder_folder, ids), atol=1e-3)
    text = ask(encoding_format="base64", embed_dtype="bfloat16", endianness="little")
    words = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.bfloat16)
    assert torch.equal(words, torch.tensor(ask()).bfloat16())
    raw = np.array(ask(normalize=False))
    assert abs(np.linalg.norm(raw) - 1) > 1e-3
    _close(raw / np.linalg.norm(raw), embedding_of(embedder_folder, ids))
    status, body, _ = embedder.post("/pooling", {"input": TEXTS[:2]})
    assert (status, body["object"], body["data"][0]["object"]) == (200, "list", "pooling")
    _close(body["data"][1]["data"], embedding_of(embedder_folder, TEXTS[1]))


@pytest.mark.parametrize("form", ["bytes", "bytes_only"])
def test_numbers_alone(embedder: Served, embedder_folder: Path, form: str) -> None:
    """The answer's body is the vectors, and a header says what and where they are."""
    body = {"input": TEXTS, "encoding_format": form, "endianness": "little"}
    sent = urllib.request.Request(
        embedder.url + "/v1/embeddings", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(sent) as response:
        raw, told, kind = response.read(), response.headers["metadata"], response.headers["content-type"]
    assert kind == "application/octet-stream"
    for vector, text in zip(np.frombuffer(raw, "<f4").reshape(len(TEXTS), -1), TEXTS, strict=True):
        _close(vector, embedding_of(embedder_folder, text))
    if form == "bytes_only":
        assert told is None
        return
    answer = json.loads(told)
    assert (answer["model"], answer["usage"]["prompt_tokens"] > 0, len(answer["data"])) == ("small", True, len(TEXTS))
    last = answer["data"][-1]
    assert (last["end"], last["shape"], last["embed_dtype"]) == (len(raw), [32], "float32")
    assert last["end"] - last["start"] == 4 * 32


WRONG = [
    ("/v1/embeddings", {"input": "a", "dimensions": 33}, 400, "dimensions is 33: the model gives 32; give no more"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions"),
    ("/v1/embeddings", {"input": []}, 400, "input is []: give at least one text"),
    ("/v1/embeddings", {"input": ""}, 400, "prompt is empty"),
    ("/v1/embeddings", {"input": ["a", ""]}, 400, "input[1]: prompt is empty: give at least one token"),
    ("/pooling", {"input": [[5], []]}, 400, "input[1]: prompt is empty"),
    ("/v1/embeddings", {"input": ["a", "b " * 200]}, 400, "input[1]: prompt has"),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 33}, 400, "dimensions is 33"),
    ("/v1/embeddings", {"input": [[4097]]}, 400, "4097"),
    ("/v2/embed", {"texts": ["a", "", "b"]}, 400, "texts[1]: prompt is empty"),
    ("/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, 400, "documents[1]: prompt is empty"),
    ("/v1/rerank", {"query": "", "documents": ["a", "b"]}, 400, "query: prompt is empty"),
    ("/v2/rerank", {"query": "a", "documents": ["a", "b " * 200]}, 400, "documents[1]: prompt has"),
    ("/score", {"text_1": "a", "text_2": ["a", ""]}, 400, "text_2[1]: prompt is empty"),
    ("/v1/score", {"queries": ["a", ""], "items": ["a", "b"]}, 400, "queries[1]: prompt is empty"),
    ("/v1/embeddings", {"input": "a", "request_id": "\u0007"}, 400, "request_id is '\\x07'"),
    ("/v1/embeddings", {"input": "a", "what": 1}, 400, "what is 1: not supported; leave it out"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "model is 'other': not served here"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, 400, "prompt_name is 'x': there are query, document"),
    ("/v1/embeddings", {"input": [1] * 129}, 400, "prompt has 129 tokens"),
    ("/v1/embeddings", {}, 400, "input is missing"),
    ("/classify", {"input": "a"}, 400, "/classify is 'classify': the model gives embeddings"),
    ("/pooling", {"input": "a", "task": "classify"}, 400, "task is 'classify': the model gives embeddings"),
    ("/score", {"text_1": "a"}, 400, "text_1 is missing"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, 400, "text_1 has 2 entries and text_2 3"),
    ("/rerank", {"query": "a", "documents": []}, 400, "documents is []"),
    ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, 400, "documents[0] is {'image': 'x'}"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 400, "gives vectors"),
    ("/v1/completions", {"prompt": "a"}, 400, "the model gives vectors and generates no text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_mistakes(embedder: Served, path: str, body: Any, status: int, message: str) -> None:
    found, answer, _ = embedder.post(path, body)
    assert (found, message in answer["error"]["message"]) == (status, True), answer
    if (named := re.match(r"(\w+)(\[\d\])?: prompt", message)) is not None:
        assert answer["error"]["param"] == named[1]


def test_scores_of_embeddings(embedder: Served, embedder_folder: Path) -> None:
    vectors = [embedding_of(embedder_folder, text) for text in TEXTS]
    expected = [float(vectors[0] @ v) for v in vectors[1:]]
    body = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
    for path, sent in (("/score", body), ("/v1/score", {"queries": [TEXTS[0]], "documents": TEXTS[1:]})):
        status, answer, _ = embedder.post(path, sent)
        assert status == 200, answer
        assert [d["score"] for d in answer["data"]] == pytest.approx(expected, abs=1e-5)


def test_cohere_embed(embedder: Served, embedder_folder: Path) -> None:
    body = {
        "model": "small",
        "texts": TEXTS,
        "input_type": "search_query",
        "embedding_types": ["float", "ubinary", "binary"],
    }
    status, answer, _ = embedder.post("/v2/embed", body)
    assert (status, answer["response_type"], answer["texts"]) == (200, "embeddings_by_type", TEXTS), answer
    for i, text in enumerate(TEXTS):
        expected = embedding_of(embedder_folder, "Find what answers this: " + text)
        _close(answer["embeddings"]["float"][i], expected)
        packed = np.packbits(expected > 0)
        assert answer["embeddings"]["ubinary"][i] == packed.tolist()
        assert answer["embeddings"]["binary"][i] == (packed.astype(int) - 128).tolist()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(reranker: Served, reranker_folder: Path, path: str) -> None:
    documents = [*TEXTS[1:], "Cats like fish."]
    expected = [score_of(reranker_folder, TEXTS[0], d) for d in documents]
    order = sorted(range(3), key=lambda i: -expected[i])
    status, answer, _ = reranker.post(path, {"model": "small", "query": TEXTS[0], "documents": documents})
    assert (status, [r["index"] for r in answer["results"]]) == (200, order), answer
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
        assert result["document"]["text"] == documents[result["index"]]
    best = reranker.post(path, {
        "query": TEXTS[0], "documents": [{"text": d} for d in documents], "top_n": 1, "return_documents": False,
    })[1]["results"]  # fmt: skip
    assert [(r["index"], "document" in r) for r in best] == [(order[0], False)]


def test_classify_and_score(reranker: Served, reranker_folder: Path) -> None:
    tokenizer, model = read(reranker_folder, AutoModelForSequenceClassification)
    status, answer, _ = reranker.post("/classify", {"input": TEXTS})
    assert status == 200, answer
    for data, text in zip(answer["data"], TEXTS, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([tokenizer(text).input_ids])).logits[0].sigmoid()
        _close(data["probs"], expected.numpy())
        assert (data["num_classes"], data["label"]) == (1, "LABEL_0")
    _, answer, _ = reranker.post("/score", {"text_1": TEXTS[:2], "text_2": TEXTS[1:]})
    expected_scores = [score_of(reranker_folder, *pair) for pair in itertools.pairwise(TEXTS)]
    assert [d["score"] for d in answer["data"]] == pytest.approx(expected_scores, abs=1e-5)


def test_metrics_and_log(reranker: Served) -> None:
    before = reranker.metric("graphllm_requests_finished_total")
    reranker.post("/classify", {"input": ["a b c", "d"], "request_id": "mine"})
    assert reranker.metric("graphllm_requests_finished_total") == before + 2
    reranker.logged("mine")
    line = next(line for line in reranker.log.read_text().splitlines() if "mine" in line)
    assert re.search(r"vectors\W+2", line), line
    reranker.idle()


def test_generating_models_say_so(served: Served) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}), ("/classify", {"input": "a"}), ("/pooling", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/embed", {"texts": ["a"]}),
    ):  # fmt: skip
        status, answer, _ = served.post(path, body)
        assert (status, "the model generates text" in answer["error"]["message"]) == (400, True), answer
