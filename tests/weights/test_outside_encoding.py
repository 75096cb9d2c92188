"""docs/adding-a-weight-encoding.md, followed: a checkpoint in an encoding that graphllm does not know."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphllm.config import ConfigError
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from graphllm.runtime.memory.staging import ragged
from graphllm.weights import encodings
from graphllm.weights.checkpoint.checkpoint import Checkpoint, WeightError
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.loading.random import random_weights
from graphllm.weights.plan.plan import WeightPlan
from tests.artifacts import artifact_of, open_executor

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "plugin_encoding"
IDS = [5, 80, 200, 17, 9, 33, 150, 61, 3]


@pytest.fixture(scope="module")
def example(own_registries: pytest.MonkeyPatch) -> Any:
    """The example's module."""
    own_registries.syspath_prepend(EXAMPLE)
    return importlib.import_module("plugin_encoding")


@pytest.fixture
def encoded(example: Any, checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The tiny Llama with its matrices encoded, and with the numbers that they stand for."""
    config = json.loads((checkpoint / "config.json").read_text())
    stored, plain = {}, {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() < 2:
            stored[name] = plain[name] = tensor
            continue
        parts = example.encode(tensor)
        stored |= {name: parts["values"], f"{name}_scale": parts["scales"]}
        plain[name] = example.decode(parts, *tensor.shape)
    folders = tmp_path / "encoded", tmp_path / "plain"
    for folder, tensors, family in zip(folders, (stored, plain), ("BlockInt8Llama", "Llama"), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [f"{family}ForCausalLM"]}))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


def _artifact(folder: Path) -> Path:
    return artifact_of(folder, backend="eager", dtype="float32", max_model_len=96, max_num_seqs=2)


def _logits(folder: Path) -> torch.Tensor:
    executor = open_executor(folder, _artifact(folder))
    table = np.arange(1, 7, dtype=np.int32)[None]
    logits = executor.run(ragged([IDS], [0], [table])).logits
    assert logits is not None
    return logits[0].float().clone()


def test_a_model_that_is_stored_so(encoded: tuple[Path, Path]) -> None:
    """The logits of the plain numbers; linear layers and head read int8 as it is stored, the embedding is decoded."""
    found, expected = (_logits(folder) for folder in encoded)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    place = _artifact(encoded[0])
    manifest = Artifact.open(place).manifest
    notes = {p["unit"]: p["notes"] for p in manifest.passes if p["pass"] == "quantize_linear" and p["changed"]}
    assert notes == {
        "layer.full": ["qkv: block_int8", "o: block_int8", "gate_up: block_int8", "down: block_int8"],
        "head": ["lm_head: block_int8"],
    }
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    w = load_weights(plan, Checkpoint.open(encoded[0]))
    stored = load_file(encoded[0] / "model.safetensors")
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    assert torch.equal(w["layers.0.qkv.values"], torch.cat([stored[n] for n in names]))
    assert torch.equal(w["layers.0.qkv.scales"], torch.cat([stored[f"{n}_scale"] for n in names]))
    assert w["embed.tokens"].dtype == torch.float32
    text = (place / "graph" / "weights.txt").read_text()
    assert "layers.0.qkv.values  int8 [128, 64]  encode(block_int8.values, concat(decode(block_int8, read " in text
    assert "sharded by output" in text
    w = random_weights(plan)
    assert float(w["embed.tokens"].std()) == pytest.approx(0.02, rel=0.05)
    assert w["layers.1.down.values"].abs().max() == 127


def test_a_part_that_is_missing(encoded: tuple[Path, Path]) -> None:
    file = encoded[0] / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    del tensors[name]
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].float()
    save_file(tensors, file, metadata={"format": "pt"})
    from graphllm.compile.families import find_model
    from graphllm.weights.plan.match import check_checkpoint
    from graphllm.weights.plan.plan import make_plan

    source = open_source(encoded[0])
    model = find_model(source.config)
    assert source.checkpoint is not None
    with pytest.raises(WeightError) as refused:
        check_checkpoint(make_plan(model, model.config(source.config), "float32"), source.checkpoint)
    assert set(refused.value.problems) == {
        f"{name}: missing",
        "model.layers.0.mlp.up_proj.weight: dtype F32, the model needs I8",
    }


def test_an_encoding_that_nobody_registered() -> None:
    with pytest.raises(ConfigError, match=r"'nobodys' is not known, there are .*int4, int8, .*; install the package"):
        encodings.encoding_of("nobodys")


def test_names_and_dtypes_are_checked(example: Any) -> None:
    one = encodings.encoding_of("block_int8")
    with pytest.raises(ValueError, match="already registered"):
        encodings.register_encoding(one)
    part = encodings.Part("values", "int3", lambda rows, inner: (rows, inner))
    with pytest.raises(ValueError, match="values is of dtype 'int3'"):
        encodings.register_encoding(encodings.Encoding("other", (part,), (1, 1), None, one.decode))


def test_the_guide_has_the_examples_files() -> None:
    text = (DOCS / "adding-a-weight-encoding.md").read_text()
    for file in ("plugin_encoding.py", "pyproject.toml"):
        assert (EXAMPLE / file).read_text() in text
