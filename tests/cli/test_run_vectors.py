"""`graphllm run --task`: embeddings, classes and scores as JSONL that is continued, and as arrays; against
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from typer.testing import CliRunner

from graphllm.cli.app import app
from tests.checkpoints import small_qwen3

TEXTS = ["A cat sleeps.", "hello", "The sun is a star."]


def _run(*words: object) -> Any:
    options = ("--backend", "eager", "--target", "cpu", "--dtype", "float32", "--max-model-len", "64", "-q")
    return CliRunner().invoke(app, ["run", *map(str, words), *options])


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_embed(tmp_path: Path) -> None:
    model = small_qwen3(transformers.Qwen3ForCausalLM, tmp_path / "m", num_hidden_layers=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    with torch.no_grad():
        states = [model.model(torch.tensor([tokenizer(t).input_ids])).last_hidden_state[0, -1] for t in TEXTS]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=1).numpy()
    lines = [{"id": f"t{i}", "text": text} for i, text in enumerate(TEXTS)]
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": "long", "text": "cat " * 400}]))
    command = (given, "--task", "embed", "-m", tmp_path / "m", "-o", out)
    done = _run(*command)
    assert done.exit_code == 1, done.output
    rows = _rows(out)
    assert [row["id"] for row in rows] == ["t0", "t1", "t2", "long"]
    np.testing.assert_allclose([row["embedding"] for row in rows[:3]], expected, rtol=1e-4, atol=1e-5)
    assert "prompt has" in rows[3]["error"]
    # Two results are lost; the third is kept as it is, and the others come again.
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[2:3]))
    assert _run(*command).exit_code == 1
    assert [row["id"] for row in _rows(out)] == ["t0", "t1", "t2", "long"]
    np.testing.assert_allclose([row["embedding"] for row in _rows(out)[:3]], expected, rtol=1e-4, atol=1e-5)
    for name in ("v.npy", "v.safetensors"):
        path = tmp_path / name
        assert _run(given, "--task", "embed", "-m", tmp_path / "m", "-o", path, "--dimensions", 8).exit_code == 1
        array = np.load(path) if name == "v.npy" else load_file(path)["vectors"]
        assert (array.shape, array.dtype, np.isnan(array[3]).all()) == ((4, 8), np.float32, True)
        cut = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(array[:3], cut, rtol=1e-4, atol=1e-5)


def test_classify_and_score(tmp_path: Path) -> None:
    model = small_qwen3(transformers.Qwen3ForSequenceClassification, tmp_path / "m", num_hidden_layers=1, num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")

    def expected(*texts: str) -> float:
        with torch.no_grad():
            ids = [i for text in texts for i in tokenizer(text).input_ids]
            return model(torch.tensor([ids])).logits[0, 0].sigmoid().item()

    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    pairs.write_text("".join(json.dumps({"query": TEXTS[0], "document": text}) + "\n" for text in TEXTS[1:]))
    assert _run(pairs, "--task", "score", "-m", tmp_path / "m", "-o", out).exit_code == 0
    assert [r["score"] for r in _rows(out)] == pytest.approx([expected(TEXTS[0], t) for t in TEXTS[1:]], abs=1e-5)
    done = _run("-p", TEXTS[0], "--task", "classify", "-m", tmp_path / "m")
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["label"], row["probs"]) == ("LABEL_0", pytest.approx([expected(TEXTS[0])], abs=1e-5))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "embed", "-p", "a", "--temperature", "1"), "temperature: not with --task embed"),
        (("--task", "score", "-p", "a"), "prompt: a score is of two texts"),
        (("--task", "embed"), "no texts: give --prompt"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    done = _run(*words)
    assert (done.exit_code, message in done.output) == (2, True), done.output
