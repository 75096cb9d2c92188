"""Cohere's client and LangChain unmodified. Their packages are not in the usual environment; docs/clients.md has the
commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.server.apis.pooling.vectors import TEXTS, embedding_of, score_of
from tests.server.live import Served

pytestmark = pytest.mark.slow


def test_cohere_embed(embedder: Served, embedder_folder: Path) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=embedder.url)
    found = client.embed(model="small", texts=TEXTS, input_type="search_document", embedding_types=["float"])
    for vector, text in zip(found.embeddings.float_, TEXTS, strict=True):
        np.testing.assert_allclose(vector, embedding_of(embedder_folder, text), rtol=1e-4, atol=1e-5)


def test_cohere_rerank(reranker: Served, reranker_folder: Path) -> None:
    cohere = pytest.importorskip("cohere")
    documents = [*TEXTS[1:], "Cats like fish."]
    expected = [score_of(reranker_folder, TEXTS[0], d) for d in documents]
    order = sorted(range(3), key=lambda i: -expected[i])
    for client in (cohere.ClientV2, cohere.Client):
        made = client(api_key="none", base_url=reranker.url)
        found = made.rerank(model="small", query=TEXTS[0], documents=documents, top_n=2)
        assert [r.index for r in found.results] == order[:2]
        assert [r.relevance_score for r in found.results] == pytest.approx([expected[i] for i in order[:2]], abs=1e-5)


def test_langchain(embedder: Served, embedder_folder: Path) -> None:
    langchain = pytest.importorskip("langchain_openai")
    client = langchain.OpenAIEmbeddings(
        model="small", base_url=f"{embedder.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    for vector, text in zip(client.embed_documents(TEXTS), TEXTS, strict=True):
        np.testing.assert_allclose(vector, embedding_of(embedder_folder, text), rtol=1e-4, atol=1e-5)
    query = client.embed_query(TEXTS[0])
    np.testing.assert_allclose(query, embedding_of(embedder_folder, TEXTS[0]), rtol=1e-4, atol=1e-5)
