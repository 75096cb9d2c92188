"""Tokens of each expert: counted in the step as routers of transformers choose, added up and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from graphllm.config import Bucket, ConfigError
from graphllm.engine.metrics.expert_load import imbalance
from graphllm.engine.metrics.metric_families import BY_NAME
from graphllm.engine.requests.request import CoreStats
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from tests.artifacts import artifact_of, open_executor
from tests.checkpoints import random_checkpoint

N, LAYERS = 6, 3
CONFIG = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
    "num_experts": N, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1],
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPTS = [[5, 80, 2, 17, 9], [33], [15, 61, 3]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, the one in the middle without experts."""
    return random_checkpoint(tmp_path_factory.mktemp("experts"), "Qwen3Moe", 4, CONFIG)


def _compile(folder: Path, backend: Any = "eager") -> Executor:
    place = artifact_of(
        folder, backend=backend, max_model_len=64, dtype="float32", count_expert_tokens=True,
        buckets=(Bucket("decode", 2, 8), Bucket("mixed", 2, 32)),
    )  # fmt: skip
    return open_executor(folder, place)


def _expected(folder: Path) -> np.ndarray:
    """What the routers of transformers choose."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    table = np.zeros((LAYERS, N), dtype=np.int64)
    with torch.inference_mode():
        for prompt in PROMPTS:
            found = model(torch.tensor([prompt]), output_router_logits=True).router_logits
            for layer, logits in zip((0, 2), found, strict=True):
                table[layer] += np.bincount(logits.topk(2, -1).indices.flatten().numpy(), minlength=N)
    return table


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_counts_are_those_of_transformers_routers(checkpoint: Path, backend: str) -> None:
    """Of a ragged batch, padded in decode; what pads is not counted."""
    executor = _compile(checkpoint, backend)
    tables = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    found = executor.run(ragged(PROMPTS, [0, 0, 0], [tables])).outputs["expert_tokens"]
    np.testing.assert_array_equal(found, _expected(checkpoint))
    step = ragged([[1], [2], [3]], [5, 1, 3], [tables])
    assert executor.run(step).outputs["expert_tokens"].sum(1).tolist() == [6, 0, 6]
    executor.close()


@pytest.mark.thorough
def test_a_bench_run_shows_them(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    small = ("--model", checkpoint, "--backend", "eager", "--target", "cpu", "--max-model-len", 64, "--max-num-seqs", 4,
             "--num-prompts", 3, "--input-len", 6, "--output-len", 4)  # fmt: skip
    for flag, layers in (("--count-expert-tokens", [2 * 4 * (6 + 3), 0, 2 * 4 * (6 + 3)]), (None, None)):
        done = cli("bench", "throughput", *small, *([flag] if flag else []), "--output", tmp_path / "out.json")
        assert done.code == 0, done.err
        found = json.loads((tmp_path / "out.json").read_text())
        assert ("Busiest expert over the mean" in done.out) == (flag is not None)
        if layers is None:
            assert "expert_tokens" not in found
            continue
        assert [sum(row) for row in found["expert_tokens"]] == layers  # with the prompt that warms up
        assert found["expert_load_imbalance"].keys() == {"0", "2"}
        assert all(1 <= ratio <= N for ratio in found["expert_load_imbalance"].values())


def test_metrics() -> None:
    stats = CoreStats(expert_tokens=[[0, 0], [3, 1]])
    counted, ratio = (BY_NAME[name].core for name in ("expert_tokens", "expert_load_imbalance"))
    assert counted is not None
    assert ratio is not None
    assert counted(stats) == {("1", "0"): 3, ("1", "1"): 1}
    assert ratio(stats) == {("1",): 1.5}
    assert counted(CoreStats()) == ratio(CoreStats()) == {}
    assert imbalance([[2, 2, 2], [0, 6, 0]]) == {0: 1.0, 1: 3.0}


def test_a_model_without_experts_has_nothing_to_count() -> None:
    with pytest.raises(ConfigError, match="count_expert_tokens is set: this model has no experts"):
        artifact_of(None, backend="eager", max_model_len=64, count_expert_tokens=True)
