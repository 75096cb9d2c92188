"""The embedded sentence embedder: its files, its vectors beside transformers', what it finds, and its training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from bench.training.paraphrases import TOPICS, batch, held_out_pairs, meaning
from graphllm import LLM
from graphllm.cli.app import app
from graphllm.embedded import EMBEDDER_DIR, MODEL_DIR

EAGER: dict[str, Any] = {"backend": "eager", "target": "cpu", "dtype": "float32", "max_model_len": 128}


@pytest.fixture(scope="module")
def vectors() -> Any:
    """Makes vectors of texts, without a model being named."""
    with LLM(runner="pooling", **EAGER) as llm:
        yield lambda texts: np.array([o.outputs.embedding for o in llm.embed(texts, use_tqdm=False)])


def test_files() -> None:
    files = [path for path in EMBEDDER_DIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert (EMBEDDER_DIR / "tokenizer.json").read_bytes() == (MODEL_DIR / "tokenizer.json").read_bytes()
    card = (EMBEDDER_DIR / "README.md").read_text()
    found = re.search(r"\| this model \| ([\d.]+)% \|", card)
    assert found is not None
    assert float(found[1]) > 90


def test_vectors_are_those_of_transformers(vectors: Any) -> None:
    texts = ["A cat sleeps.", "Ann bought a car in Paris.", "The garden has two cats in it. " * 6, "x"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDER_DIR)
    model = transformers.AutoModel.from_pretrained(EMBEDDER_DIR, dtype=torch.float32).eval()
    with torch.no_grad():
        means = [model(**tokenizer(t, return_tensors="pt")).last_hidden_state[0].mean(0) for t in texts]
    expected = torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()
    cosines = (vectors(texts) * expected).sum(1)
    np.testing.assert_allclose(cosines, 1, atol=1e-5)


def test_finds_paraphrases(vectors: Any) -> None:
    pairs = held_out_pairs(300, seed=5)
    queries, documents = vectors([a for a, _ in pairs]), vectors([b for _, b in pairs])
    found = (queries @ documents.T).argmax(1)
    assert (found == np.arange(300)).mean() > 0.95


def test_what_is_held_out_is_not_trained_on() -> None:
    rng = Random(1)
    for topic in TOPICS:
        near = meaning(rng, topic)
        assert not near.held_out
        assert not meaning(rng, topic, near=near).held_out
        assert meaning(rng, topic, held_out=True).held_out
    trained = {text for _ in range(30) for pair in batch(rng, 32) for text in pair}
    assert trained.isdisjoint(text for pair in held_out_pairs(500, seed=1) for text in pair)


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vectors: Any) -> None:
    options = ("--backend", "eager", "--target", "cpu", "--dtype", "float32", "--max-model-len", "128", "-q")
    done = CliRunner().invoke(app, ["run", "--task", "embed", "--prompt", "A cat sleeps.", *options])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    np.testing.assert_allclose(row["embedding"], vectors(["A cat sleeps."])[0], atol=1e-6)


@pytest.mark.thorough
def test_training(tmp_path: Path) -> None:
    """A second of it: the folder is whole, and the card says what was measured."""
    command = [sys.executable, "-m", "bench.training.train_embedder", "--out", str(tmp_path / "made")]
    subprocess.run([*command, "--minutes", "0.02", "--batch", "8", "--count", "20"], check=True, capture_output=True)
    names = {str(path.relative_to(EMBEDDER_DIR)) for path in EMBEDDER_DIR.rglob("*")}
    assert {str(path.relative_to(tmp_path / "made")) for path in (tmp_path / "made").rglob("*")} == names
    assert "TF-IDF over words" in (tmp_path / "made" / "README.md").read_text()
