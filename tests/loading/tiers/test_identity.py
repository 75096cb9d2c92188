"""What makes another identity of cached blocks: another model, another layout, other weights of the same shapes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from graphllm.config import CompileConfig, Target, key_fields
from graphllm.config.setting import definitions
from graphllm.loading.tiers.identity import EXCLUDED, cache_identity, computing_settings, identity_key
from graphllm.program.artifact import Artifact
from graphllm.weights.checkpoint.checkpoint import Checkpoint

_CONFIG = CompileConfig(target=Target("cpu", ()))


def test_every_setting_of_the_compiler_counts_unless_it_is_excluded() -> None:
    plain = computing_settings(_CONFIG)
    names = {name for name, d in definitions(CompileConfig).items() if d.not_key is None}
    assert EXCLUDED.keys() <= names
    assert all(EXCLUDED.values())
    assert {*plain} == names - EXCLUDED.keys()
    assert plain.items() <= key_fields(_CONFIG).items()
    for change in ({"dtype": "float32"}, {"kv_cache_dtype": "fp8"}, {"block_size": 32}, {"quantization": "int8"},
                   {"tensor_parallel_size": 2}, {"max_model_len": 999}):  # fmt: skip
        assert computing_settings(dataclasses.replace(_CONFIG, **change)) != plain  # type: ignore[arg-type]
    for change in ({"max_num_seqs": 7}, {"backend": "eager"}, {"tune": True}):
        assert computing_settings(dataclasses.replace(_CONFIG, **change)) == plain  # type: ignore[arg-type]


def _checkpoint(folder: Path, values: np.ndarray) -> Path:
    """A folder with one tensor in a safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"w": {"dtype": "F32", "shape": [values.size], "data_offsets": [0, values.nbytes]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + values.tobytes())
    return folder


def _facts(artifact: Artifact, checkpoint: Checkpoint | None, stages: int = 1, **settings: Any) -> dict[str, Any]:
    """The identity of an artifact without weights, compiled with other settings."""
    factors = artifact.manifest.factors
    compiled = dataclasses.replace(factors.compile, **settings)
    manifest = msgspec.structs.replace(artifact.manifest, factors=msgspec.structs.replace(factors, compile=compiled))
    unbaked = SimpleNamespace(manifest=manifest, program=artifact.program, is_baked=False)
    return cache_identity(cast("Artifact", unbaked), checkpoint, stages)


def _identity(artifact: Artifact, folder: Path) -> str:
    return identity_key(_facts(artifact, Checkpoint.open(folder)))


@pytest.fixture(scope="module")
def artifact(eager_artifact: Path) -> Artifact:
    return Artifact.open(eager_artifact)


def test_weights_of_the_same_shapes_are_told_apart(tmp_path: Path, artifact: Artifact) -> None:
    values = np.arange(100_000, dtype=np.float32)
    folder = _checkpoint(tmp_path / "a", values)
    first = _identity(artifact, folder)
    assert _identity(artifact, folder) == first
    shutil.copytree(folder, tmp_path / "copy")  # with its times
    assert _identity(artifact, tmp_path / "copy") == first
    tuned = values + 1
    times = (folder / "model.safetensors").stat()
    other = _checkpoint(tmp_path / "b", tuned)
    os.utime(other / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert _identity(artifact, other) != first  # by its numbers
    tuned = values.copy()
    tuned[3] += 1  # where no sample is taken
    assert _identity(artifact, _checkpoint(tmp_path / "c", tuned)) != first  # by its time


def test_the_hubs_cache_knows_contents(tmp_path: Path, artifact: Artifact) -> None:
    """Files are named by their SHA-256 there: a second download is the same model."""
    values, found = np.arange(1000, dtype=np.float32), []
    for place, digest in (("one", "a" * 64), ("two", "a" * 64), ("three", "b" * 64)):
        blobs, snapshot = tmp_path / place / "blobs", tmp_path / place / "snapshots" / "main"
        blobs.mkdir(parents=True)
        _checkpoint(snapshot, values)
        (snapshot / "model.safetensors").rename(blobs / digest)
        (snapshot / "model.safetensors").symlink_to(blobs / digest)
        os.utime(blobs / digest, (len(found), len(found)))
        found.append(_identity(artifact, snapshot))
    assert found[0] == found[1] != found[2]


def test_random_weights_and_stages(artifact: Artifact) -> None:
    one, two = _facts(artifact, None, 1), _facts(artifact, None, 2)
    assert one["weights"] == ["random"]
    assert {name for name in one if one[name] != two[name]} == {"stages"}
    assert json.loads(json.dumps(one)) == one


def test_rounding_counts_where_it_is_promised(artifact: Artifact) -> None:
    """In deterministic mode another artifact is another identity."""
    assert _facts(artifact, None, max_num_seqs=3) == _facts(artifact, None, max_num_seqs=4)
    exact = [_facts(artifact, None, max_num_seqs=number, deterministic=True) for number in (3, 4)]
    assert exact[0] != exact[1]
