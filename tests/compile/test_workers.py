"""Build processes: nothing is asked of the script that needs them, and what goes wrong in one is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import graphllm
from graphllm.compile.backends import Built
from graphllm.compile.objects import BuildError
from graphllm.compile.workers import Build, Candidate, Done, Workers
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import TensorSpec
from graphllm.rewrite import ImplChoice

CONFIG = CompileConfig(Target("cpu", ("x86_64",)), backend="eager", buckets=(Bucket("mixed", 2, 16),))
# Not guarded by `if __name__ == "__main__"`.
SCRIPT = """
import sys
from pathlib import Path
print("once", file=sys.stderr)
from graphllm.compile.pipeline import compile_model
from graphllm.config import EngineArgs
from graphllm.entrypoints.resolve import compile_config
from graphllm.entrypoints.source import open_source

source = open_source(sys.argv[1])
args = EngineArgs(target="cpu", backend="eager", max_num_seqs=2, max_num_batched_tokens=16, jobs=int(sys.argv[3]))
compile_model(source.config, source.tensors, compile_config(source.config, args), Path(sys.argv[2]))
"""


def test_a_script_needs_no_main_guard(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    made = {}
    for jobs in (1, 2):
        place = tmp_path / f"artifact{jobs}"
        command = [sys.executable, str(script), str(checkpoint), str(place), str(jobs)]
        environment = {**os.environ, "PYTHONPATH": str(Path(graphllm.__file__).parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert (done.returncode, done.stderr) == (0, "once\n")
        made[jobs] = {f.name: f.read_bytes() for f in (place / "pieces").iterdir()}
        made[jobs]["program"] = (place / "program.json").read_bytes()
    assert made[1] == made[2]
    assert len(made[1]) > 4


def test_what_goes_wrong_in_a_worker() -> None:
    with Workers(CONFIG, 1) as workers:
        with pytest.raises(BuildError, match=r"KeyError: 'made'\nTraceback"):
            workers.build({}, CONFIG.buckets[0], {}).result()
        piece = {"made": [["float32", [2, 3], [3, 1]]], "inputs": ["x"]}
        built = workers.build(piece, CONFIG.buckets[0], {}).result()
        assert built.bundle["ir"] == json.loads(json.dumps(piece))
        problem = workers.problem(Candidate("no_such_op", {}, {}, {"T": 1}, ImplChoice("triton", {}))).result()
        assert problem == "triton {}: KeyError: 'no_such_op'"
        workers._processes[0].kill()
        for _ in range(2):
            with pytest.raises(BuildError, match=r"a build process ended with status -9.*lower --jobs"):
                workers.build(piece, CONFIG.buckets[0], {}).result()


def test_an_error_ends_the_workers() -> None:
    workers = Workers(CONFIG, 2)

    def failing() -> None:
        with workers:
            for _ in range(5):
                workers.build({}, CONFIG.buckets[0], {})
            raise RuntimeError("of the compile")

    with pytest.raises(RuntimeError, match="of the compile"):
        failing()
    assert [p.returncode for p in workers._processes] == [-9, -9]


def test_jobs_and_answers_are_plain_data() -> None:
    choices = {"linear mixed-2-16": ImplChoice("triton_row", {"BLOCK": 64, "stages": 3})}
    spec = TensorSpec("bfloat16", ("T", 64), (64, 1))
    built = Built({"code": [["empty", "o0"]]}, {"k": "int x;"}, {"a.cubin": b"\x00\xff"}, ("all: reference",), "", [{}])
    for message in (
        Build({"nodes": [[1, None, 0.5]]}, CONFIG.buckets[0], choices),
        Candidate("linear", {"x": spec}, {"eps": 1e-6, "bias": None}, {"T": 16, "S": 2}, choices["linear mixed-2-16"]),
        Done(built, "triton: no room"),
    ):
        data = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(data, type=type(message)) == message
