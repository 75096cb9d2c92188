"""Two processes with one thread each serve a dense Llama: the logits of one process, from one artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphllm.config import ConfigError
from graphllm.program.artifact import Artifact
from graphllm.runtime.memory.staging import StepInput, ragged
from tests.artifacts import artifact_of, open_executor
from tests.runtime.artifact_ranks import Ranks

PROMPTS = [[5, 80, 200, 17, 9, 33, 150, 61, 3], [7, 1, 99]]
STEPS = 4
BLOCKS = 32


@pytest.fixture
def biased(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny Llama with a bias on every linear layer: those behind a sum over ranks must be added once."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name.replace(".weight", ".bias")] = torch.randn(tensors[name].shape[0]) * 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _compiled(folder: Path, degree: int, **wanted: Any) -> Path:
    settings = {"backend": "eager", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4}
    return artifact_of(folder, **settings, tensor_parallel_size=degree, **wanted)


def _step(new: list[list[int]], done: list[int]) -> StepInput:
    """One ragged batch: these tokens behind the ones that are done. Every sequence has six blocks of its own."""
    table = np.arange(1, 1 + 6 * len(new), dtype=np.int32).reshape(len(new), 6)
    return ragged(new, done, [table])


def _greedy(run: Callable[[StepInput], np.ndarray]) -> tuple[list[np.ndarray], list[list[int]]]:
    """The logits of a prefill and of decode steps, and the tokens that they choose."""
    new, done, logits, tokens = [list(p) for p in PROMPTS], [0] * len(PROMPTS), [], []
    for _ in range(STEPS):
        logits.append(run(_step(new, done)).copy())
        done = [d + len(n) for d, n in zip(done, new, strict=True)]
        tokens.append([int(row.argmax()) for row in logits[-1]])
        new = [[t] for t in tokens[-1]]
    return logits, tokens


@pytest.mark.thorough
def test_two_processes_give_the_logits_of_one(biased: Path, tmp_path: Path) -> None:
    one = _compiled(biased, 1)
    executor = open_executor(biased, one, BLOCKS)
    expected, text = _greedy(lambda step: executor.run(step).logits.float().numpy())

    two = _compiled(biased, 2)
    manifest, alone = Artifact.open(two).manifest, Artifact.open(one).manifest
    notes = {p["unit"]: p["notes"] for p in manifest.passes if p["pass"] == "shard" and p["changed"]}
    assert notes == {
        "embed": ["tokens: all_reduce"],
        "layer.full": ["o: all_reduce", "down: all_reduce"],
        "head": ["lm_head: all_gather"],
    }
    assert manifest.memory.weights < alone.memory.weights
    assert manifest.memory.block * 2 == alone.memory.block
    with closing(Ranks(two, biased, 2, BLOCKS)) as ranks:
        found, same = _greedy(lambda step: ranks.run(step)["logits"])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    assert same == text


def test_degrees_that_do_not_fit(biased: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3: layers.0.qkv has 4 heads"):
        _compiled(biased, 3)


def test_alone_it_is_refused(biased: Path, tmp_path: Path) -> None:
    """An artifact of two ranks in one process would add up half of the numbers."""
    two = _compiled(biased, 2)
    executor = open_executor(biased, two, BLOCKS)
    with pytest.raises(RuntimeError, match="compiled for 2 ranks of the group 'tensor', this process is in one of 1"):
        executor.run(_step([[5, 80]], [0]))


@pytest.mark.thorough
def test_a_rank_that_cannot_start_says_why(biased: Path, tmp_path: Path) -> None:
    two = _compiled(biased, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"rank 0: .*empty: neither model.safetensors"):
        Ranks(two, tmp_path / "empty", 2, BLOCKS)
