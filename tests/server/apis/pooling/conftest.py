"""Small models that give vectors, with random weights and the embedded model's tokenizer, and servers of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.artifacts import artifact_of, flags
from tests.checkpoints import small_qwen3
from tests.server.live import Served

OPTIONS: dict[str, Any] = {
    "backend": "eager", "target": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8,
}  # fmt: skip


@pytest.fixture(scope="session")
def embedder_folder(shared: Any) -> Path:
    """A language model that serves as an embedder."""

    def write(folder: Path) -> None:
        small_qwen3(transformers.Qwen3ForCausalLM, folder)
        prompts = {"query": "Find what answers this: ", "document": ""}
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))

    return shared("embedder", write)


@pytest.fixture(scope="session")
def reranker_folder(shared: Any) -> Path:
    """A cross-encoder of one class."""
    return shared(
        "reranker", lambda folder: small_qwen3(transformers.Qwen3ForSequenceClassification, folder, num_labels=1)
    )


def _serve(folder: Path, place: Path, *options: str, **settings: Any) -> Iterator[Served]:
    settings = OPTIONS | settings
    artifact_of(folder, **settings)
    server = Served(place / "log", folder, *flags(settings), "--served-model-name", "small", *options)
    yield server.wait_ready()
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="session")
def embedder(embedder_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the embedder, with two fronts."""
    place = tmp_path_factory.mktemp("embedder")
    yield from _serve(embedder_folder, place, "--api-server-count", "2", runner="pooling")


@pytest.fixture(scope="session")
def reranker(reranker_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the reranker."""
    yield from _serve(reranker_folder, tmp_path_factory.mktemp("reranker"))
