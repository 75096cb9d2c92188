"""What a GPU's engine begins before torch is there, with a library in the place of the CUDA driver."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.stub_driver import run_with_driver

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from graphllm.config import CompileConfig, CoreConfig, LoadConfig, ModelConfig, ParallelConfig, Peers, Target
from graphllm.loading.core.early_start import begin_early
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.artifact import Artifact
from graphllm.program.manifest import Factors, Implementation, Manifest, MemoryTable
folder, artifact, device, ranks, stages, peers = sys.argv[1:]
parallel = ParallelConfig(pipeline_parallel_size=int(stages))
config = CoreConfig(ModelConfig(folder), LoadConfig(artifact), parallel=parallel)
if int(peers):
    config = dataclasses.replace(config, peers=Peers(0, 2, "folder"))
compiled = CompileConfig(Target(device, ()), tensor_parallel_size=int(ranks))
factors = Factors(5, {}, {}, {}, compiled, {}, "")
memory = MemoryTable(0, 0, {}, 0, 0, 0, 0, 0, 0, 0)
manifest = Manifest(factors, {}, Implementation("model_defs/llama.py"), [], [], {}, [], memory, {}, {}, {}, {}, {})
begun = begin_early(StoredWeights(config, Artifact(Path(artifact), manifest)))
if begun.functions is not None:
    print(bool(begun.functions.get({"cubin": "one.cubin", "symbol": "f", "shared": 0})))
if begun.weights is not None:
    layout, _ = begun.weights._begun.result()
    begun.weights.finish(lambda done, total: None)
    print(begun.weights._counter.done == sum(move.nbytes for move in layout.moves))
begun.close()
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("device", "ranks", "stages", "peers", "found"),
    [
        ("cuda", 1, 1, 0, ["True", "True"]),
        ("cuda", 1, 1, 1, ["True"]),
        ("cuda", 2, 1, 0, []),
        ("cuda", 1, 2, 0, []),
        ("cpu", 1, 1, 0, []),
    ],
)
def test_of_one_gpu(
    device: str, ranks: int, stages: int, peers: int, found: list[str], eager_artifact: Path, checkpoint: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    (pieces / "one.cubin").write_bytes(b"one\0")
    kernel = {"cubin": "one.cubin", "symbol": "f", "shared": 0}
    (pieces / "a.json").write_text(json.dumps({"kernels": {"k": kernel}}))
    shutil.copy(eager_artifact / "weights.json", tmp_path)
    said = (str(checkpoint), str(tmp_path), device, str(ranks), str(stages), str(peers))
    printed, calls = run_with_driver(tmp_path, SCRIPT, *said)
    assert printed == found
    assert calls.count("f of one") == bool(found)
