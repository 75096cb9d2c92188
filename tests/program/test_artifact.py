"""A wrong artifact is refused at once, by name; a killed or doubled compile leaves nothing half-made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphllm.config import CompileConfig, Target
from graphllm.program import artifact
from graphllm.program.artifact import Artifact, ArtifactError
from graphllm.program.manifest import Implementation, Manifest, MemoryTable
from tests.artifacts import compiled_twice
from tests.tiers import draws
from tests.waiting import until


@pytest.fixture
def copy(compiled_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the compiled artifact, to be damaged."""
    return Path(shutil.copytree(compiled_artifact, tmp_path / "artifact"))


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _flip(file: Path, at: int, mask: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= mask
    file.write_bytes(content)


def _truncate(folder: Path) -> None:
    os.truncate(folder / "pieces" / "kernels.so", 1000)


def _flip_kernels(folder: Path) -> None:
    _flip(folder / "pieces" / "kernels.so", 5000, 1)


def _remove(folder: Path) -> None:
    (folder / "program.json").unlink()


def _damage_manifest(folder: Path) -> None:
    _flip(folder / "manifest.json", 400, 1)


def _edit(path: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(manifest: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            manifest = manifest[name]
        manifest[last] = change(manifest[last])

    return apply


DAMAGE = {
    "truncated": (_truncate, ["kernels.so", "1000 bytes", "compile again"]),
    "flipped byte": (_flip_kernels, ["kernels.so", "checksum", "compile again"]),
    "missing file": (_remove, ["program.json is missing", "compile again"]),
    "damaged manifest": (_damage_manifest, ["manifest.json is damaged", "compile again"]),
}
# Everything is intact and signed here, but made elsewhere.
FOREIGN = {
    "other torch": (_edit("factors.versions.torch", lambda v: "2.0.1"), ["versions.torch", "2.0.1"]),
    "other CPU": (
        _edit("factors.compile.target.arch", lambda v: [*v[:-1], "avx9000"]),
        ["target.arch", "only in the artifact ['avx9000']", "only here"],
    ),
    "a GPU": (
        _edit("factors.compile.target", lambda v: {"device": "cuda", "arch": ["sm_10", "sms_1"]}),
        ["artifact", "cuda", "sm_10"],
    ),
    "other model": (_edit("factors.model.rms_norm_eps", lambda v: 0.5), ["config.json.rms_norm_eps", "0.5"]),
    "other tensors": (_edit("factors.checkpoint", lambda v: "0" * 64), ["tensor names, shapes or dtypes differ"]),
    "other format": (_edit("factors.format", lambda v: v + 1), ["format", "compile again"]),
}


@pytest.mark.parametrize("kind", [*DAMAGE, *FOREIGN])
def test_refused_before_torch_is_imported(kind: str, copy: Path, checkpoint: Path, refused: Any, resign: Any) -> None:
    if kind in DAMAGE:
        damage, expected = DAMAGE[kind]
        damage(copy)
    else:
        edit, expected = FOREIGN[kind]
        resign(copy, edit)
    done = refused("run", "--model", checkpoint, "--artifact", copy, "--prompt", "hello")
    assert done.code == 2
    assert done.out == ""
    assert [part for part in expected if part not in done.err] == [], done.err
    assert len(done.err.splitlines()) == 1, done.err


def test_intact_artifact_is_accepted(copy: Path) -> None:
    opened = Artifact.open(copy)
    opened.check_machine()
    assert set(opened.manifest.files) == {str(f.relative_to(copy)) for f in _files(copy)} - {"manifest.json"}


def test_every_file_is_checked(copy: Path) -> None:
    for file in _files(copy):
        content = file.read_bytes()
        for damaged in (content[:-1], content + b"x", b"", content[:-1] + bytes([content[-1] ^ 1])):
            file.write_bytes(damaged)
            with pytest.raises(ArtifactError, match=file.name):
                Artifact.open(copy)
        file.unlink()
        with pytest.raises(ArtifactError, match=file.name):
            Artifact.open(copy)
        file.write_bytes(content)
    Artifact.open(copy)


@settings(deadline=None, max_examples=draws(50, 150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(copy: Path, which: int, where: float, bit: int) -> None:
    files = _files(copy)
    file = files[which % len(files)]
    at = int(where * file.stat().st_size)
    _flip(file, at, 1 << bit)
    try:
        with pytest.raises(ArtifactError, match=file.name):
            Artifact.open(copy)
    finally:
        _flip(file, at, 1 << bit)


def test_differences_names_every_leaf() -> None:
    here = {"a": {"x": 1, "y": 2}, "b": [1], "arch": ["p", "q"]}
    there = {"a": {"x": 1, "y": 3, "z": 0}, "b": [2], "arch": ["q", "r"]}
    assert artifact.differences(here, there) == [
        "a.y: artifact has 3, here it is 2",
        "a.z: artifact has 0, here it is (absent)",
        "arch: only here ['p'], only in the artifact ['r']",
        "b: artifact has [2], here it is [1]",
    ]
    assert artifact.differences({"a": {"x": 1}}, {}) == ["a: artifact has (absent), here it is (present)"]
    assert artifact.differences(here, here) == []


@pytest.mark.thorough
def test_two_compiles_of_one_key(checkpoint: Path, cache: Path) -> None:
    small = ("--backend", "eager", "--target", "cpu", "--max-num-seqs", 2, "--max-num-batched-tokens", 16)
    Artifact.open(compiled_twice(cache, checkpoint, *small))


def _manifest(checkpoint: str) -> Manifest:
    """Of an artifact of nothing."""
    config = CompileConfig(Target("cpu", ("x86_64",)))
    memory = MemoryTable(0, 0, {}, 0, 0, 0, 0, 0, 0, 0)
    factors = artifact.key_factors({}, checkpoint, config)
    return Manifest(factors, {}, Implementation("model_defs/llama.py"), [], [], {}, [], memory, {}, {}, {}, {}, {})


def test_same_artifact_made_meanwhile_stays(tmp_path: Path) -> None:
    place = tmp_path / "artifact"

    def build(name: str) -> Path:
        files = tmp_path / name
        (files / "pieces").mkdir(parents=True)
        (files / "pieces" / "one.json").write_text(name)
        return files

    slow, fast = build("slow"), build("fast")
    artifact.write(place, fast, _manifest("one"))
    artifact.write(place, slow, _manifest("one"))
    assert (place / "pieces" / "one.json").read_text() == "fast"
    assert not slow.exists()
    artifact.write(place, build("other key"), _manifest("two"))
    assert (place / "pieces" / "one.json").read_text() == "other key"
    artifact.write(place, build("rebuilt"), _manifest("two"))
    assert (place / "pieces" / "one.json").read_text() == "rebuilt"


@pytest.mark.thorough
def test_killed_compile_leaves_no_artifact(checkpoint: Path, cache: Path, tmp_path: Path, cli: Any) -> None:
    """Killed while the C++ compiler runs and the build folder exists."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    real = shutil.which("g++")
    reached = tmp_path / "reached"
    hang = f"touch {reached}; exec sleep 1000"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *generated0.cpp*) {hang};; *) exec {real} "$@";; esac\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-c", "from graphllm.cli import main; main()", "compile", str(checkpoint)]
    command += ["--target", "cpu", "--max-num-seqs", "1", "--buckets", "mixed-2-16", "--max-num-batched-tokens", "16"]
    environment = {**os.environ, "PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    compiling = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        until(reached.exists, process=compiling)
    finally:
        os.killpg(compiling.pid, signal.SIGKILL)
        compiling.communicate()
    lock, left = sorted((cache / "artifacts").iterdir(), key=lambda p: p.name.startswith(".building-"))
    assert left.name.startswith(".building-")
    assert lock.suffix == ".lock"

    done = cli("compile", checkpoint, "--backend", "eager", "--target", "cpu", "--max-num-seqs", 2)
    assert done.code == 0
    assert {str(p) for p in (cache / "artifacts").iterdir()} == {str(lock), done.out.strip()}


def test_failed_compile_leaves_nothing(
    checkpoint: Path, cache: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphllm.compile.codegen import objects

    def fail(self: Any, command: list[str]) -> None:
        raise objects.BuildError("g++ said no")

    monkeypatch.setattr(objects._Compilers, "run", fail)
    limits = ("--max-num-seqs", 1, "--buckets", "mixed-2-16", "--max-num-batched-tokens", 16)
    done = cli("compile", checkpoint, "--target", "cpu", *limits)
    assert (done.code, done.err.strip()) == (2, "graphllm: compile failed: g++ said no")
    assert list((cache / "artifacts").iterdir()) == []


def test_rebuild_replaces_an_artifact_and_nothing_else(checkpoint: Path, tmp_path: Path, cli: Any) -> None:
    mine = tmp_path / "documents"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    small = ("--backend", "eager", "--target", "cpu", "--max-num-seqs", 2, "--max-num-batched-tokens", 16)
    done = cli("compile", checkpoint, *small, "--output", mine)
    assert done.code == 2
    assert "documents" in done.err
    assert (mine / "thesis.txt").read_text() == "years of work"

    place = tmp_path / "artifact"
    for page in (8, 16):
        assert cli("compile", checkpoint, *small, "--block-size", page, "--output", place).code == 0
        assert Artifact.open(place).config.block_size == page
    assert {p.name for p in tmp_path.iterdir()} == {"documents", "artifact"}


def test_write_takes_the_place_of_what_another_process_finished(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    for content in ("first", "second"):
        building = artifact.begin(folder)
        (building / "pieces").mkdir()
        (building / "pieces" / "a").write_text(content)
        artifact.write(folder, building, _manifest("one"))
    assert (folder / "pieces" / "a").read_text() == "second"
    assert Artifact.open(folder).manifest.factors == _manifest("one").factors
    assert list(tmp_path.iterdir()) == [folder]


def test_build_folders_of_running_processes_stay(tmp_path: Path) -> None:
    ours = artifact.begin(tmp_path / "one")
    gone = tmp_path / ".building-999999999-two"
    gone.mkdir()
    artifact.begin(tmp_path / "three")
    assert ours.exists()
    assert not gone.exists()


def test_a_folder_that_cannot_be_written_to_is_named(
    checkpoint: Path, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "file" / "cache"))
    done = cli("compile", checkpoint, "--backend", "eager", "--target", "cpu", "--max-num-seqs", 2)
    assert done.code == 2
    assert f"cannot write to {tmp_path}/file/cache/artifacts" in done.err
    assert "GRAPHLLM_CACHE" in done.err
    elsewhere = tmp_path / "made"
    done = cli("compile", checkpoint, "--backend", "eager", "--target", "cpu", "--max-num-seqs", 2, "-o", elsewhere)
    assert done.code == 0


def test_manifest_is_readable_json(compiled_artifact: Path) -> None:
    whole = json.loads((compiled_artifact / "manifest.json").read_text())
    manifest = json.loads(whole["manifest"])
    assert manifest["factors"]["compile"]["max_model_len"] == 96
    assert manifest["factors"]["model"]["architectures"] == ["LlamaForCausalLM"]
