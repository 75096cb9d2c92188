"""Build processes: nothing is asked of the script that needs them, and what goes wrong in one is told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import graphllm
from graphllm.compile.codegen.file_locks import kernel_turn
from graphllm.compile.codegen.jobs import Build, Built, Candidate, Done, Find, Tunable
from graphllm.compile.codegen.objects import BuildError
from graphllm.compile.tuning.workers import Workers
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import TensorSpec
from graphllm.rewrite import ImplChoice
from tests.waiting import PATIENCE, until

CONFIG = CompileConfig(Target("cpu", ("x86_64",)), backend="eager", buckets=(Bucket("mixed", 2, 16),))
# Not guarded by `if __name__ == "__main__"`.
SCRIPT = """
import sys
from pathlib import Path
print("once", file=sys.stderr)
from graphllm.compile.pipeline import compile_model
from graphllm.config import EngineArgs
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source

source = open_source(sys.argv[1])
args = EngineArgs(target="cpu", backend="eager", max_num_seqs=2, max_num_batched_tokens=16, jobs=int(sys.argv[3]))
compile_model(source.config, source.tensors, compile_config(source.config, args), Path(sys.argv[2]))
"""


@pytest.mark.thorough
def test_a_script_needs_no_main_guard(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    made = {}
    for jobs in (1, 2):
        place = tmp_path / f"artifact{jobs}"
        command = [sys.executable, str(script), str(checkpoint), str(place), str(jobs)]
        environment = {**os.environ, "PYTHONPATH": str(Path(graphllm.__file__).parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
        assert (done.returncode, done.stderr) == (0, "once\n")
        made[jobs] = {f.name: f.read_bytes() for f in (place / "pieces").iterdir()}
        made[jobs]["program"] = (place / "program.json").read_bytes()
    assert made[1] == made[2]
    assert len(made[1]) > 4


@pytest.mark.thorough
def test_what_goes_wrong_in_a_worker() -> None:
    with Workers(CONFIG, 1) as workers:
        with pytest.raises(BuildError, match=r"KeyError: 'made'\nTraceback"):
            workers.build({}, CONFIG.buckets[0], {}).result()
        piece = {"made": [["float32", [2, 3], [3, 1]]], "inputs": ["x"]}
        built = workers.build(piece, CONFIG.buckets[0], {}).result()
        assert built.bundle["ir"] == json.loads(json.dumps(piece))
        (pid,) = map(int, Path(f"/proc/{workers._parent.pid}/task/{workers._parent.pid}/children").read_text().split())
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(BuildError, match=r"a build process ended with status -9.*lower --jobs"):
                workers.build(piece, CONFIG.buckets[0], {}).result()


@pytest.mark.thorough
def test_candidates_compile_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a linear layer is in Triton's cache then; what cannot be compiled is told."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = CompileConfig(Target("cuda", ("sm_90", "sms_132")), buckets=(Bucket("decode", 1, 1),), tune=True)
    tensors = {
        "x_TI": TensorSpec("bfloat16", ("T", 64), (64, 1)),
        "weight_OI": TensorSpec("bfloat16", (32, 64), (64, 1)),
    }
    optional = ("bias_O", "norm_I", "residual_TN", "scales_GO", "zeros_GO", "a_LRI", "b_LrO", "adapter_ids_T", "widths")
    plain = dict.fromkeys(optional) | {"eps": 0.0, "gated": False, "form": "", "group": 0}
    choice = ImplChoice("triton_row", {"block_n": 8, "block_k": 64, "warps": 1})
    with Workers(config, 1) as workers:
        told = [
            workers.problem(Candidate(Tunable(op, tensors, plain, {"T": 1}, []), choice)).result()
            for op in ("fused_linear", "no_such_op")
        ]
    assert told == ["", 'triton_row {"block_n": 8, "block_k": 64, "warps": 1}: KeyError: \'no_such_op\'']
    assert [f.name for f in tmp_path.glob("*/*.cubin")] == ["row_kernel.cubin"]


@pytest.mark.thorough
def test_the_process_they_come_from_is_killed_while_some_of_them_live() -> None:
    """What waits for a worker that is not forked yet is told, and does not wait for the ones that are."""
    config = CompileConfig(Target("cuda", ("sm_90", "sms_132")), buckets=(Bucket("decode", 1, 1),), tune=True)
    with Workers(config, 1) as workers:
        known = Candidate(Tunable("no_such_op", {}, {}, {"T": 1}, []), ImplChoice("reference", {}))
        assert "no_such_op" in workers.problem(known).result()  # one is there
        os.kill(workers._parent.pid, signal.SIGKILL)
        with pytest.raises(BuildError, match="a build process ended with status -9"):
            workers.build({}, CONFIG.buckets[0], {}).result(PATIENCE)


def test_an_error_ends_the_workers() -> None:
    workers = Workers(CONFIG, 2)

    def failing() -> None:
        with workers:
            for _ in range(5):
                workers.build({}, CONFIG.buckets[0], {})
            raise RuntimeError("of the compile")

    with pytest.raises(RuntimeError, match="of the compile"):
        failing()
    assert workers._parent.returncode == -9
    until(lambda: not [text for text in _groups() if f"{workers._parent.pid} " in text])


def _groups() -> list[str]:
    """Of every process here that is no zombie: parent, group and session."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *numbers = file.read_text().rpartition(") ")[2].split()[:4]
            if state != "Z":
                found.append(" ".join(numbers) + " ")
    return found


def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Workers(CONFIG, 2) as workers, pytest.raises(BuildError, match="a build process ended with status 1"):
        workers.build({}, CONFIG.buckets[0], {}).result()


def test_they_come_from_one_process_that_has_imported_the_compiler() -> None:
    """Each is a fork of it, begins with its first job, and ends with the others."""
    with Workers(CONFIG, 3) as workers:
        piece = {"made": [["float32", [2, 3], [3, 1]]], "inputs": ["x"]}
        for future in [workers.build(piece, CONFIG.buckets[0], {}) for _ in range(6)]:
            assert future.result().bundle["ir"]["inputs"] == ["x"]
        parent = workers._parent.pid
        forked = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        assert len(forked) == 3
    assert workers._parent.returncode == 0
    assert not [pid for pid in forked if Path(f"/proc/{pid}").exists()]


def _waiting(folder: Path) -> int:
    """How many wait for a lock of a file there."""
    files = [f":{file.stat().st_ino} " for file in folder.iterdir()]
    return sum("->" in line and any(file in line for file in files) for line in Path("/proc/locks").open())


def test_one_process_compiles_a_kernel_and_the_others_wait(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        begun: list[str] = []

        def compile(kernel: str) -> None:
            with kernel_turn(tmp_path, kernel):
                begun.append(kernel)

        with kernel_turn(tmp_path, "one"):
            same, other = pool.submit(compile, "one"), pool.submit(compile, "other")
            other.result(PATIENCE)
            until(lambda: _waiting(tmp_path) == 1)
            assert begun == ["other"]
        same.result(PATIENCE)
    assert begun == ["other", "one"]


def test_jobs_and_answers_are_plain_data() -> None:
    choices = {"linear mixed-2-16": ImplChoice("triton_row", {"BLOCK": 64, "stages": 3})}
    spec = TensorSpec("bfloat16", ("T", 64), (64, 1))
    plain = {"eps": 1e-6, "bias": None, "sizes": [1, 2]}
    site = Tunable("linear", {"x": spec}, plain, {"T": 16, "S": 2}, list(choices.values()))
    built = Built({"code": [["empty", "o0"]]}, {"k": "int x;"}, {"a.cubin": b"\x00\xff"}, ("all: reference",), "", [{}])
    for message in (
        Build({"nodes": [[1, None, 0.5]]}, CONFIG.buckets[0], choices),
        Find({"nodes": [[1, None, 0.5]]}, CONFIG.buckets[0]),
        Candidate(site, choices["linear mixed-2-16"]),
        Done(built, "triton: no room"),
        Done(sites={"linear mixed-2-16": site}),
    ):
        data = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(data, type=type(message)) == message
