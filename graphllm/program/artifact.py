"""The artifact on disk: key, manifest, atomic writing and verification. Needs no torch, so a wrong one is refused fast.

A folder with ``manifest.json`` (every key factor in clear, a checksum for each file), ``program.json``,
``weights.json``, ``pieces/`` and ``graph/``, and maybe the weights themselves (`graphllm.program.baked_table`).
docs/artifact.md describes the format.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphllm import version
from graphllm.config import CompileConfig, ConfigError, key_fields
from graphllm.host.machine import detect_target, plugins, source_files, versions
from graphllm.program import baked_table

FORMAT = 5
# Fields of config.json that name things without changing the computation, with the reason.
EXCLUDED_MODEL_FIELDS = {
    "_name_or_path": "where the checkpoint came from",
    "transformers_version": "who wrote the file",
    "dtype": "the source dtype; the artifact's own dtype is in the compile config",
    "torch_dtype": "older name of dtype",
    "use_cache": "a switch of another runtime",
    "bos_token_id": "read from the checkpoint at run time",
    "eos_token_id": "read from the checkpoint at run time",
    "pad_token_id": "read from the checkpoint at run time",
}


class ArtifactError(ConfigError):
    """An artifact that cannot be used here. The message names what differs or is damaged, and the remedy."""


def source_digest() -> str:
    """SHA-256 over the project's own code that shapes artifacts: another compiler gives another key. How weights are
    loaded (weights/loading) shapes none."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    folders = ("ir", "compile", "ops", "rewrite", "passes", "model_defs", "weights", "program")
    files = [root / "host/compiler.py", *(file for folder in folders for file in source_files(root / folder))]
    for file in files:
        if root / "weights/loading" not in file.parents:
            found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def key_factors(model_config: Mapping[str, Any], tensors: str, config: CompileConfig) -> dict[str, Any]:
    """Everything an artifact depends on, by name. tensors: digest of the checkpoint's tensor names, shapes and
    dtypes."""
    return {
        "format": FORMAT,
        "graphllm": {"version": version.__version__, "source": source_digest()},
        "plugins": plugins(),
        "versions": versions(config.target),
        "compile": key_fields(config),
        "model": {k: v for k, v in model_config.items() if k not in EXCLUDED_MODEL_FIELDS},
        "checkpoint": tensors,
    }


def key_of(factors: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of the factors."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(expected: Any, found: Any, name: str = "") -> list[str]:
    """The leaves in which two sets of factors differ, as ``name: artifact has X, here is Y``."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        out = []
        for k in sorted({*expected, *found}):
            out += differences(expected.get(k, "(absent)"), found.get(k, "(absent)"), f"{name}.{k}" if name else k)
        return out
    if expected == found:
        return []
    if isinstance(expected, list) and isinstance(found, list) and name.endswith("arch"):
        return [
            f"{name}: only here {sorted({*expected} - {*found})}, only in the artifact {sorted({*found} - {*expected})}"
        ]
    return [f"{name}: artifact has {_shown(found)}, here it is {_shown(expected)}"]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(present)"
    return value if value == "(absent)" else f"{value!r:.80}"


def write(folder: Path, files: Path, manifest: Mapping[str, Any]) -> Path:
    """Finish the artifact built in ``files`` (a sibling of ``folder``) and move it to its place in one rename.

    An artifact that is there already is replaced, but for the same one that another process made meanwhile: it may be
    reading it.
    """
    made = [f for f in sorted(files.rglob("*")) if f.is_file()]
    begun = min((f.stat().st_mtime for f in made), default=0.0)
    sums = {
        str(f.relative_to(files)): [f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest()]
        for f in made
        if f.name != baked_table.DATA  # gigabytes, with a table of its own
    }
    text = json.dumps({**manifest, "files": sums}, indent=1, sort_keys=True)
    whole = json.dumps({"digest": hashlib.sha256(text.encode()).hexdigest(), "manifest": text})
    (files / "manifest.json").write_text(whole)
    for file in (*made, files / "manifest.json"):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    old = files.with_name(f"{files.name}-old")  # `begin` removes it if this process dies right here
    while True:
        try:
            files.rename(folder)
            return folder
        except OSError as taken:
            if taken.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):
            if (folder / "manifest.json").stat().st_mtime >= begun and _same(folder, json.loads(text)):
                shutil.rmtree(files)
                return folder
            folder.rename(old)
            shutil.rmtree(old)


def _same(folder: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        return bool(read_manifest(folder)["factors"] == manifest.get("factors"))
    except ArtifactError:
        return False


def check_replaceable(folder: Path) -> None:
    """Raise ArtifactError when something else than an artifact is at ``folder``: writing one there would destroy it."""
    if folder.is_dir():
        names = {p.name for p in folder.iterdir()}
        if not names or {"manifest.json", "pieces"} <= names:
            return
    if folder.exists():
        raise ArtifactError(f"output: {folder} exists and is no artifact; give a new or an empty folder")


def begin(folder: Path) -> Path:
    """A fresh build folder beside ``folder``. Build folders whose process is gone are removed. Raises ArtifactError
    where nothing can be written."""
    made = folder.parent / f".building-{os.getpid()}-{folder.name}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
    except OSError as failure:
        raise ArtifactError(
            f"output: cannot write to {folder.parent} ({failure.strerror}); give another folder, or for the cache set "
            "GRAPHLLM_CACHE"
        ) from failure
    for stale in folder.parent.glob(".building-*"):
        owner = stale.name.split("-")[1]
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(stale, ignore_errors=True)
    return made


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, checked against its own digest. Raises ArtifactError when it is absent or damaged."""
    path = folder / "manifest.json"
    try:
        whole = json.loads(path.read_text())
        text = whole["manifest"]
        intact = hashlib.sha256(text.encode()).hexdigest() == whole["digest"]
        manifest = json.loads(text)
    except FileNotFoundError as missing:
        raise ArtifactError(
            f"{folder} is no artifact: it has no manifest.json; make one with `graphllm compile`"
        ) from missing
    except (ValueError, KeyError, TypeError) as damage:
        raise ArtifactError(f"{path} is damaged ({damage}); compile again") from damage
    if not intact:
        raise ArtifactError(f"{path} is damaged: its digest does not match; compile again")
    if manifest.get("factors", {}).get("format") != FORMAT:
        raise ArtifactError(
            f"{folder} has another artifact format than {FORMAT}, the one this version reads; compile again"
        )
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Check every file's size and checksum; the manifest. Raises ArtifactError naming the first damaged file."""
    manifest = read_manifest(folder)
    for name, (size, digest) in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ArtifactError(f"{file} is missing from the artifact; compile again")
        found = file.stat().st_size
        if found != size:
            raise ArtifactError(
                f"{file} has {found} bytes, the manifest says {size}: truncated or replaced; compile again"
            )
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise ArtifactError(f"{file} does not match its checksum: changed on disk; compile again")
    if baked_table.TABLE in manifest["files"]:
        baked_table.check(folder)
    return manifest


def check_machine(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ArtifactError unless the artifact was made for this machine and these versions."""
    factors = manifest["factors"]
    compiled = factors["compile"]["target"]
    try:
        target = detect_target(compiled["device"])
    except ConfigError as none:
        made_for = " ".join([compiled["device"], *compiled["arch"]])
        raise ArtifactError(f"{folder} was made for {made_for}, which is not here; compile again") from none
    here = {"versions": versions(target), "target": {"device": target.device, "arch": list(target.arch)}}
    found = differences(here, {"versions": factors["versions"], "target": compiled})
    if found:
        raise ArtifactError(f"{folder} was made for another machine or version; compile again. {'; '.join(found)}")


def check_model(folder: Path, manifest: Mapping[str, Any], model_config: Mapping[str, Any], tensors: str) -> None:
    """Raise ArtifactError unless the artifact was made for this checkpoint's config and tensors."""
    factors = manifest["factors"]
    here = {k: v for k, v in model_config.items() if k not in EXCLUDED_MODEL_FIELDS}
    found = differences(here, factors["model"], "config.json")
    if factors["checkpoint"] != tensors:
        found.append("checkpoint: tensor names, shapes or dtypes differ")
    if found:
        raise ArtifactError(f"{folder} was made for another model; compile again. {'; '.join(found)}")
