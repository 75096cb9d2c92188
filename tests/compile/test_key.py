"""The artifact key: everything is in it unless an exclusion says why not."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

import graphllm
from graphllm import version
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.host.machine import plugins
from graphllm.program import artifact
from tests.tiers import thorough

BUCKETS = (Bucket("decode", 1, 1), Bucket("mixed", 2, 64))
CONFIG = CompileConfig(Target("cpu", ("x86_64", "avx2"), "a label"), buckets=BUCKETS)


def _key(config: CompileConfig = CONFIG, model: Any = None, tensors: str = "t") -> str:
    return artifact.key_of(artifact.key_factors(model or {"hidden_size": 8}, tensors, config))


def _other(value: Any) -> list[Any]:
    """Values of the same kind that differ from it."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, -value - 1]
    if isinstance(value, str):
        return [value + "x", ""]
    if isinstance(value, (tuple, list)):
        kind = type(value)
        shorter = [kind(value[1:])] if value else []
        return [kind([*value, "more"]), *shorter, *([kind(value[::-1])] if len(value) > 1 else [])]
    if isinstance(value, dict):
        return [{**value, "more": 1}]
    assert value is None
    return [Path("somewhere")]


def _mutations(value: Any, path: str = "", reason: str | None = None) -> Iterator[tuple[str, str | None, Any]]:
    """Every config that differs in one place: where, the reason to leave that place out of the key, and the config."""
    for field in dataclasses.fields(value):
        here, found = f"{path}{field.name}", getattr(value, field.name)
        why = reason or field.metadata.get("not_key")
        inner: list[tuple[str, str | None, Any]] = []
        if dataclasses.is_dataclass(found):
            inner += _mutations(found, f"{here}.", why)
        elif isinstance(found, tuple) and found and dataclasses.is_dataclass(found[0]):
            inner += [(where, w, (first, *found[1:])) for where, w, first in _mutations(found[0], f"{here}[0].", why)]
            inner += [(here, why, found[1:]), (here, why, found[::-1])]
        else:
            inner += [(here, why, other) for other in _other(found)]
        yield from ((where, w, dataclasses.replace(value, **{field.name: other})) for where, w, other in inner)


MUTATIONS = list(_mutations(CONFIG))


def test_mutations_reach_every_field() -> None:
    reached = {where for where, _, _ in MUTATIONS}
    outermost = {where.partition(".")[0].partition("[")[0] for where in reached}
    assert {f.name for f in dataclasses.fields(CompileConfig)} == outermost
    assert {f"target.{f.name}" for f in dataclasses.fields(Target)} <= reached
    assert {f"buckets[0].{f.name}" for f in dataclasses.fields(Bucket)} <= reached


@pytest.mark.parametrize(("where", "reason", "config"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_every_field_of_the_config(where: str, reason: str | None, config: CompileConfig) -> None:
    assert config != CONFIG
    if reason is None:
        assert _key(config) != _key()
    else:
        assert len(reason) > 10, "an exclusion says why"
        assert _key(config) == _key()


@pytest.mark.parametrize("config", [pytest.param(LlamaConfig(), id="llama"), thorough(GPT2Config(), id="gpt2")])
def test_every_entry_of_the_model_config(config: Any) -> None:
    full = json.loads(config.to_json_string(use_diff=False)) | {"torch_dtype": "bfloat16", "_name_or_path": "there"}
    assert len(full) > 20
    for name, value in full.items():
        without = {k: v for k, v in full.items() if k != name}
        for changed in (without, without | {name: _other(value)[0] if value is not None else 1}):
            same = _key(model=json.loads(json.dumps(changed))) == _key(model=full)
            assert same == (name in artifact.EXCLUDED_MODEL_FIELDS), name
    assert all(len(reason) > 10 for reason in artifact.EXCLUDED_MODEL_FIELDS.values())


def test_order_of_the_model_config_does_not_matter() -> None:
    assert _key(model={"a": 1, "b": {"c": 2, "d": 3}}) == _key(model={"b": {"d": 3, "c": 2}, "a": 1})


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (artifact, "FORMAT", 99),
        (version, "__version__", "99"),
        (artifact, "source_digest", lambda: "other"),
        (artifact, "versions", lambda target: {"torch": "99"}),
        (artifact, "plugins", lambda: {"mine": "mine.ops 0123"}),
    ],
    ids=["format", "version", "source", "torch", "plugins"],
)
def test_what_surrounds_the_config(module: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    assert before == _key()
    monkeypatch.setattr(module, name, value)
    assert _key() != before


def test_tensors() -> None:
    assert _key(tensors="other") != _key()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package that `source_digest` reads instead of the installed one."""
    ignored = shutil.ignore_patterns("*.pyc", "embedded")
    root = Path(shutil.copytree(Path(graphllm.__file__).parent, tmp_path / "graphllm", ignore=ignored))
    monkeypatch.setattr(artifact, "__file__", str(root / "program/artifact.py"))
    return root


def test_source_digest_of_a_copy_is_the_same(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    copied = artifact.source_digest()
    monkeypatch.undo()
    assert artifact.source_digest() == copied


@pytest.mark.parametrize(
    "file",
    [
        "host/compiler.py",
        "ir/op.py",
        "compile/codegen/lower.py",
        "ops/gemm/linear/op.py",
        "ops/gemm/linear/cpu.cpp",
        "ops/cpu/vectors.h",
        "rewrite/unit.py",
        "passes/canonicalize.py",
        "model_defs/llama.py",
        "weights/plan/plan.py",
        "program/linking.py",
    ],
)
def test_source_digest_sees_every_source_file(file: str, tree: Path) -> None:
    before = artifact.source_digest()
    (tree / file).write_text((tree / file).read_text() + "\n")
    assert artifact.source_digest() != before


def test_source_digest_sees_names(tree: Path) -> None:
    before = artifact.source_digest()
    (tree / "passes" / "new.py").touch()
    added = artifact.source_digest()
    (tree / "passes" / "new.py").rename(tree / "passes" / "newer.py")
    assert len({before, added, artifact.source_digest()}) == 3
    (tree / "passes" / "newer.py").unlink()
    (tree / "ops" / "README.md").write_text("prose")
    (tree / "cli" / "app.py").write_text("other commands")
    assert artifact.source_digest() == before


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """plugin(source): install a package that is an entry point, without importing it."""

    def install(source: str) -> None:
        (tmp_path / "a_plugin").mkdir(exist_ok=True)
        (tmp_path / "a_plugin" / "__init__.py").write_text(source)
        info = tmp_path / "a_plugin-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[graphllm.plugins]\nmine = a_plugin\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def test_plugins_are_in_the_key_by_their_source(plugin: Callable[[str], None]) -> None:
    without = _key()
    plugin("raise RuntimeError('imported')")
    one = _key()
    assert plugins()["mine"].startswith("a_plugin ")
    plugin("raise RuntimeError('imported, changed')")
    assert len({without, one, _key()}) == 3
    assert "a_plugin" not in sys.modules
