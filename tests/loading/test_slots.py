"""How many sequences run at once by default, where each has recurrent states."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import EngineArgs, Env
from graphllm.loading.artifact import resolve
from graphllm.loading.artifact.build import take_artifact
from graphllm.loading.artifact.compiling import build
from graphllm.loading.checkpoint.source import find_source
from graphllm.program.artifact import Artifact
from tests.models import test_parity as parity


def _taken(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Artifact:
    monkeypatch.setenv("GRAPHLLM_CACHE", str(cache))
    assert Env.read().cache_dir == cache
    fields = {"target": "cpu", "backend": "eager", "dtype": "float32", "max_num_batched_tokens": 128, "tune": False}
    args = EngineArgs(str(folder), **fields, **given)
    return take_artifact(find_source(args), args, lambda *stage: None).artifact


def test_fewer_sequences_where_their_states_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as have room in half of what the weights leave, unless the user says how many. The second start knows it
    without the compiler."""
    parity.saved_oracle(next(a for a in parity.ARCHS if a.name == "mamba2"), tmp_path / "model")
    usual = _taken(tmp_path / "model", tmp_path / "first", monkeypatch)
    assert usual.config.max_num_seqs == 64
    assert "max_num_seqs" not in caplog.text
    each, weights = usual.memory.snapshot, usual.memory.weights

    monkeypatch.setattr(resolve, "total_memory", lambda: weights + 2 * 20 * each)
    with caplog.at_level(logging.WARNING):
        fewer = _taken(tmp_path / "model", tmp_path / "second", monkeypatch)
    assert fewer.config.max_num_seqs == 16
    assert "max_num_seqs is 16, not 64" in caplog.text
    monkeypatch.setattr("graphllm.loading.artifact.compiling.build", lambda *given: pytest.fail("compiled again"))
    assert _taken(tmp_path / "model", tmp_path / "second", monkeypatch).folder == fewer.folder
    monkeypatch.setattr("graphllm.loading.artifact.compiling.build", build)
    said = _taken(tmp_path / "model", tmp_path / "second", monkeypatch, max_num_seqs=32)
    assert said.config.max_num_seqs == 32


def test_machines_that_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has as many sequences as its own memory allows, whoever came first. Engine cores of one machine share its
    memory."""
    parity.saved_oracle(next(a for a in parity.ARCHS if a.name == "mamba2"), tmp_path / "model")

    def taken(memory: int, **given: Any) -> int:
        monkeypatch.setattr(resolve, "total_memory", lambda: memory)
        return _taken(tmp_path / "model", tmp_path / "cache", monkeypatch, **given).config.max_num_seqs

    large = 8 << 30
    assert taken(large) == 64
    used = Artifact.open(next((tmp_path / "cache" / "artifacts").glob("model-*"))).memory
    small = used.weights + 2 * 20 * used.snapshot
    assert [taken(small), taken(large), taken(small)] == [16, 64, 16]
    assert taken(2 * small, data_parallel_size=2) == 16
    monkeypatch.setattr("graphllm.loading.artifact.compiling.build", lambda *given: pytest.fail("compiled again"))
    next((tmp_path / "cache" / "artifacts").glob(".model-*.sequences")).unlink()
    assert taken(small, artifact="require") == 16


def test_a_cache_of_blocks_has_most_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside blocks, states have a quarter of what the weights leave."""
    parity.saved_oracle(next(a for a in parity.ARCHS if a.name == "lfm2"), tmp_path / "model")
    usual = _taken(tmp_path / "model", tmp_path / "cache", monkeypatch)
    assert usual.config.max_num_seqs == 64
    assert usual.memory.block
    memory = usual.memory.weights + 4 * 20 * usual.memory.snapshot
    monkeypatch.setattr(resolve, "total_memory", lambda: memory)
    assert _taken(tmp_path / "model", tmp_path / "cache", monkeypatch).config.max_num_seqs == 16
