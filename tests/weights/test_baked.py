"""Baked weights: the numbers of the checkpoint, the tokens of an artifact without them, refusal of every wrong file,
one copy in memory for all processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphllm.config import ConfigError, EngineArgs, Env
from graphllm.loading.artifact.build import find_or_build
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from graphllm.program import baked_table
from graphllm.program.artifact import Artifact, ArtifactError
from graphllm.program.baked_table import BakedError
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading import baked, loader
from graphllm.weights.plan.expr import Concat, Encode, Permute, Read, Tie, Values
from graphllm.weights.plan.plan import Entry, WeightPlan
from tests.artifacts import compiled_twice
from tests.tiers import thorough
from tests.waiting import PATIENCE

SMALL = ("--backend", "eager", "--target", "cpu", "--max-num-seqs", 2, "--max-num-batched-tokens", 16)
ASK = ("--prompt", "hello world", "--max-tokens", 12, "--temperature", 0, "--quiet")


def _bake(checkpoint: Path, folder: Path) -> None:
    source = open_source(checkpoint)
    wanted = EngineArgs(target="cpu", backend="eager", max_num_seqs=2, max_num_batched_tokens=16)
    config = compile_config(source.config, wanted)
    find_or_build(source, config, Env.read(), "rebuild", lambda *_: None, folder, bake=True)


@pytest.fixture(scope="session")
def baked_artifact(shared: Any, checkpoint: Path) -> Path:
    """The tiny Llama with the eager backend and its weights. Do not write into it."""
    return shared("baked", lambda folder: _bake(checkpoint, folder))


@pytest.fixture
def copy(baked_artifact: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(baked_artifact, tmp_path / "artifact"))


@pytest.fixture
def other(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint of the same shapes that differs in all numbers of one tensor."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_parameters_are_the_checkpoints_numbers(baked_artifact: Path, checkpoint: Path) -> None:
    stored, found = load_file(checkpoint / "model.safetensors"), baked.open_weights(baked_artifact)
    plan = WeightPlan.from_json((baked_artifact / "weights.json").read_text())
    assert list(found) == [e.name for e in plan]
    parts = [(e, e.expr.parts if isinstance(e.expr, Concat) else (e.expr,)) for e in plan]
    read = [(e, [p for p in of if isinstance(p, Read)]) for e, of in parts]
    read = [(e, reads) for (e, reads), (_, of) in zip(read, parts, strict=True) if len(reads) == len(of)]
    assert sum(len(reads) for _, reads in read) == len(stored)
    for e, reads in read:
        expected = torch.cat([stored[r.sources[0]].view(r.shape) for r in reads])
        assert found[e.name].shape == e.shape
        assert torch.equal(found[e.name], expected.view(e.shape)), e.name
        assert found[e.name].data_ptr() % 4096 == 0


def test_any_plan(tmp_path: Path) -> None:
    """Casts, transposes, ties, values, a scalar and nothing at all, by hand."""
    a, b = torch.arange(12.0).view(3, 4), torch.tensor(7.0)
    save_file({"a": a, "b": b, "e": torch.empty(0, 4)}, tmp_path / "model.safetensors")
    entries = (
        Entry("turned", (4, 3), "bfloat16", Permute(Read(("a",), (3, 4)), (1, 0))),
        Entry("tied", (4, 3), "bfloat16", Tie("turned")),
        Entry("scalar", (), "float32", Read(("b",), ())),
        Entry("values", (2,), "float16", Values((0.5, -2.0), (2,))),
        Entry("empty", (0, 4), "float32", Read(("e",), (0, 4))),
    )
    (tmp_path / "weights.json").write_text(WeightPlan(entries).to_json())
    baked.bake(tmp_path, Checkpoint.open(tmp_path))
    baked_table.check_contents(tmp_path)
    found = baked.open_weights(tmp_path)
    assert torch.equal(found["turned"], a.T.bfloat16())
    assert found["tied"].data_ptr() == found["turned"].data_ptr()
    assert (found["scalar"].item(), found["scalar"].shape) == (7.0, ())
    assert found["values"].tolist() == [0.5, -2.0]
    assert found["values"].dtype == torch.float16
    assert found["empty"].shape == (0, 4)


def test_read_in_chunks(tmp_path: Path) -> None:
    """As to a GPU: every tensor from its place in the file, in many reads."""
    numbers = torch.arange(200, dtype=torch.int16)
    (tmp_path / "data").write_bytes(numbers.numpy().tobytes())
    places = {"first": 0, "matrix": 40, "last": 398}
    shapes: dict[str, tuple[int, ...]] = {"first": (5,), "matrix": (4, 20), "last": ()}
    tensors = {name: torch.zeros(shape, dtype=torch.int16) for name, shape in shapes.items()}
    tied = {**tensors, "tied": tensors["first"]}
    told: list[tuple[int, int]] = []
    with mock.patch.object(loader, "_CHUNK", 16):
        place = {**places, "tied": 0}
        with loader.begin_tensors(tmp_path / "data", tied, place, lambda *done: told.append(done)) as loading:
            assert loading.finish() is tied
    assert tensors["first"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(tensors["matrix"], numbers[20:100].view(4, 20))
    assert tensors["last"].item() == 199
    assert told[-1] == (172, 172)


@pytest.mark.parametrize("kind", [thorough("int8"), "int4"])
def test_quantized_weights_are_baked_packed(kind: Any, checkpoint: Path, cli: Any, tmp_path: Path) -> None:
    place = tmp_path / "artifact"
    assert cli("compile", checkpoint, *SMALL, "--quantization", kind, "--bake-weights", "-o", place).code == 0
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    packed = [e for e in plan if isinstance(e.expr, Encode)]
    assert packed
    found, made = baked.open_weights(place), loader.load_weights(plan, Checkpoint.open(checkpoint))
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    done = cli("run", "--model", checkpoint, "--artifact", place, *ASK)
    assert done.code == 0, done.err
    assert done.out == cli("run", "--model", checkpoint, *SMALL, "--quantization", kind, *ASK).out


def test_same_tokens_without_the_checkpoints_weights(
    cli: Any, checkpoint: Path, baked_artifact: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))
    plain = cli("run", "--model", checkpoint, "--artifact", eager_artifact, *ASK)
    assert plain.code == 0
    assert plain.out.strip()
    for model in (checkpoint, bare):
        done = cli("run", "--model", model, "--artifact", baked_artifact, *ASK)
        assert (done.code, done.out) == (0, plain.out), done.err
    needs = cli("run", "--model", bare, "--artifact", eager_artifact, *ASK)
    assert needs.code == 2
    assert "neither model.safetensors nor model.safetensors.index.json" in needs.err


def test_cached_artifact_with_weights_is_found(cli: Any, checkpoint: Path) -> None:
    place = Path(cli("compile", checkpoint, *SMALL, "--bake-weights").out.strip())
    assert baked_table.is_baked(place)
    done = cli("run", "--model", checkpoint, "--artifact", "require", *SMALL, *ASK)
    assert done.code == 0, done.err
    assert cli("compile", checkpoint, *SMALL).out.strip() == str(place)
    assert not baked_table.is_baked(place)


def _truncate(folder: Path) -> None:
    os.truncate(folder / baked_table.DATA, 10_000)


def _remove(folder: Path) -> None:
    (folder / baked_table.DATA).unlink()


def _replace(folder: Path) -> None:
    """By another file of the same size."""
    (folder / baked_table.DATA).write_bytes(os.urandom((folder / baked_table.DATA).stat().st_size))


def _edit_table(folder: Path) -> None:
    table = json.loads((folder / baked_table.TABLE).read_text())
    table["tensors"]["embed.tokens"] = next(iter(table["tensors"].values()))
    (folder / baked_table.TABLE).write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "has 10000 bytes, baked.json says"),
        (_remove, "weights.bin is missing from the artifact"),
        (_replace, "is not the file that baked.json describes"),
        (_edit_table, "baked.json"),
    ],
)
def test_wrong_file_is_refused_before_torch_is_imported(
    damage: Callable[[Path], None], message: str, copy: Path, checkpoint: Path, refused: Any
) -> None:
    damage(copy)
    done = refused("run", "--model", checkpoint, "--artifact", copy, *ASK)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "compile again" in done.err
    assert len(done.err.splitlines()) == 1


def test_other_checkpoint_is_refused_before_torch_is_imported(baked_artifact: Path, other: Path, refused: Any) -> None:
    done = refused("run", "--model", other, "--artifact", baked_artifact, *ASK)
    assert (done.code, done.out) == (2, "")
    assert "was made of other weights than those in" in done.err


def test_full_check_finds_any_flipped_bit(cli: Any, copy: Path) -> None:
    assert "checksum verified" in cli("inspect", copy).out
    size = (copy / baked_table.DATA).stat().st_size
    for at in (4096, size // 2, size - 1):
        with (copy / baked_table.DATA).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 16]))
        Artifact.open(copy)  # what a start looks at is intact
        done = cli("inspect", copy)
        assert done.code == 2
        assert "weights.bin does not match its checksum" in done.err
        with (copy / baked_table.DATA).open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    baked_table.check_contents(copy)


def test_table_is_part_of_the_manifest(copy: Path) -> None:
    _edit_table(copy)
    with pytest.raises(ArtifactError, match=r"baked\.json"):
        Artifact.open(copy)


def test_dummy_weights_are_not_baked(cli: Any, checkpoint: Path) -> None:
    done = cli("compile", checkpoint, *SMALL, "--bake-weights", "--load-format", "dummy")
    assert done.code == 2
    assert "bake_weights: there are none with --load-format dummy" in done.err


MAPS = """
import re, sys
from pathlib import Path
from graphllm.program import baked_table
from graphllm.weights.loading import baked
found = baked.open_weights(Path(sys.argv[1]))
total = sum(float(t.float().sum()) for t in found.values())  # reads all pages
print("ready", flush=True)
sys.stdin.readline()
maps = Path("/proc/self/smaps").read_text()
(part,) = [p for p in re.split(r"^(?=[0-9a-f]+-)", maps, flags=re.M) if baked_table.DATA in p.partition("\\n")[0]]
sizes = {n: int(v) for n, v in re.findall(r"^(\\w+): +(\\d+) kB", part, flags=re.M)}
shared, own = (sizes[f"{whose}_Clean"] + sizes[f"{whose}_Dirty"] for whose in ("Shared", "Private"))
print(part.split()[1], sizes["Rss"], shared, own, flush=True)
sys.stdin.readline()  # the other one still looks
"""


@pytest.mark.thorough
def test_two_processes_share_one_copy_from_a_read_only_folder(copy: Path) -> None:
    for path in (*copy.rglob("*"), copy):
        path.chmod(0o555 if path.is_dir() else 0o444)
    command = [sys.executable, "-c", MAPS, str(copy)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert [p.stdout and p.stdout.readline() for p in both] == ["ready\n", "ready\n"]
        for p in both:
            assert p.stdin is not None
            assert p.stdout is not None
            p.stdin.write("\n")
            p.stdin.flush()
            access, resident, shared, own = p.stdout.readline().split()
            assert access == "r--s"
            assert int(shared) == int(resident) > 0.9 * (copy / baked_table.DATA).stat().st_size / 1024
            assert own == "0"
    finally:
        for p in both:
            p.communicate(timeout=PATIENCE)
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.thorough
def test_two_compiles_of_one_key(checkpoint: Path, cache: Path) -> None:
    made = compiled_twice(cache, checkpoint, *SMALL, "--bake-weights")
    Artifact.open(made)
    baked_table.check_contents(made)


@pytest.mark.thorough
def test_full_disk_leaves_nothing(checkpoint: Path, cache: Path) -> None:
    """A limit on the size of files stands for the disk's."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "from graphllm.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "compile", str(checkpoint), *map(str, SMALL), "--bake-weights"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "bake_weights: " in done.stderr
    assert "make room there, or leave --bake-weights out" in done.stderr.replace("\n", " ")
    assert list((cache / "artifacts").iterdir()) == []


def test_format_of_the_future(copy: Path) -> None:
    table = json.loads((copy / baked_table.TABLE).read_text())
    (copy / baked_table.TABLE).write_text(json.dumps({**table, "format": 99}))
    with pytest.raises(BakedError, match="format 99"):
        baked.check(copy)
    assert issubclass(BakedError, ConfigError)


def test_some_of_them(baked_artifact: Path) -> None:
    """Into memory that is there, with no other parameter read."""
    whole = baked.open_weights(baked_artifact)
    into = {name: torch.zeros_like(whole[name]) for name in [*whole][1:6:2]}
    with baked.begin_weights(baked_artifact, torch.device("cpu"), into) as loading:
        found = loading.finish()
    assert found.keys() == into.keys()
    assert all(found[name] is into[name] and torch.equal(into[name], whole[name]) for name in into)
