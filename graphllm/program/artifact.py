"""The artifact on disk: key, manifest, atomic writing and verification. Needs no torch, so a wrong one is refused fast.

A folder with ``manifest.json`` (every key factor in clear, a checksum for each file), ``program.json``,
``weights.json``, ``pieces/`` and ``graph/``, and maybe the weights themselves (`graphllm.program.baked_table`).
docs/artifact.md describes the format. `Artifact.open` checks and reads it once; everybody else is handed the result.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from graphllm import version
from graphllm.config import CompileConfig, ConfigError, key_fields
from graphllm.host.libraries import Libraries
from graphllm.host.machine import detect_target, plugins, source_files, versions
from graphllm.host.prebuilt import find_library
from graphllm.program import baked_table
from graphllm.program.implementation import versions_of_model
from graphllm.program.manifest import Factors, Manifest, MemoryTable
from graphllm.program.program import Program, read_program

FORMAT = 5
KERNELS = Path("pieces") / "kernels.so"  # a CPU's library of kernels, in an artifact; not every one has it
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


def key_factors(model_config: Mapping[str, Any], tensors: str, config: CompileConfig) -> Factors:
    """Everything an artifact depends on, by name. tensors: digest of the checkpoint's tensor names, shapes and
    dtypes."""
    return Factors(
        format=FORMAT,
        graphllm={"version": version.__version__, "source": source_digest()},
        plugins=plugins(),
        versions=versions(config.target) | versions_of_model(model_config),
        compile=config,
        model=_computing(model_config),
        checkpoint=tensors,
    )


def key_of(factors: Factors) -> str:
    """SHA-256 over the canonical JSON of the factors."""
    text = json.dumps(factor_data(factors), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def factor_data(factors: Factors) -> dict[str, Any]:
    """The factors as JSON has them: of the settings, those that are in the key."""
    return {**msgspec.structs.asdict(factors), "compile": key_fields(factors.compile)}


def _computing(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that change the computation."""
    return {k: v for k, v in model_config.items() if k not in EXCLUDED_MODEL_FIELDS}


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


def write(folder: Path, files: Path, manifest: Manifest) -> Path:
    """Finish the artifact built in ``files`` (a sibling of ``folder``) and move it to its place in one rename.

    An artifact that is there already is replaced, unless another process has just written the same one: it may be
    reading it.
    """
    made = [f for f in sorted(files.rglob("*")) if f.is_file()]
    begun = min((f.stat().st_mtime for f in made), default=0.0)
    sums = {
        str(f.relative_to(files)): (f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest())
        for f in made
        if f.name != baked_table.DATA  # gigabytes, with a table of its own
    }
    whole = {**msgspec.structs.asdict(manifest), "memory": msgspec.to_builtins(manifest.memory)}
    factors = factor_data(manifest.factors)
    text = json.dumps({**msgspec.to_builtins(whole | {"factors": factors}), "files": sums}, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (files / "manifest.json").write_text(json.dumps({"digest": digest, "manifest": text}))
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
            if (folder / "manifest.json").stat().st_mtime >= begun and _same(folder, factors):
                shutil.rmtree(files)
                return folder
            folder.rename(old)
            shutil.rmtree(old)


def _same(folder: Path, factors: Mapping[str, Any]) -> bool:
    try:
        return bool(read_json(folder)["factors"] == json.loads(json.dumps(factors)))
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
    """A fresh build folder next to ``folder``. Build folders of processes that are gone are removed. Raises
    ArtifactError where nothing can be written."""
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


def read_json(folder: Path) -> dict[str, Any]:
    """The manifest as it is written, checked against its own digest. Raises ArtifactError when it is absent, damaged,
    or of another format."""
    path = folder / "manifest.json"
    try:
        whole = json.loads(path.read_text())
        text = whole["manifest"]
        intact = hashlib.sha256(text.encode()).hexdigest() == whole["digest"]
        manifest: dict[str, Any] = json.loads(text)
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


class Artifact:
    """An artifact that can be used.

    folder: where it is.
    manifest: what it says of itself.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The artifact in a folder, after a look at every file's size and checksum. Raises ArtifactError that names the
        first damaged file."""
        opened = cls.trusted(folder)
        for name, (size, digest) in opened.manifest.files.items():
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
        if baked_table.TABLE in opened.manifest.files:
            baked_table.check(folder)
        return opened

    @classmethod
    def trusted(cls, folder: Path) -> Self:
        """The same without checking the files, for callers that only read the manifest, and where another process has
        checked the files. Raises ArtifactError for a damaged manifest."""
        found = read_json(folder)
        try:
            return cls(folder, msgspec.convert(found, Manifest))
        except msgspec.ValidationError as other:
            raise ArtifactError(f"{folder / 'manifest.json'} is another version's ({other}); compile again") from other

    @property
    def config(self) -> CompileConfig:
        """What it was compiled for."""
        return self.manifest.factors.compile

    @property
    def memory(self) -> MemoryTable:
        """What it takes on one device."""
        return self.manifest.memory

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self.config.target.device

    @property
    def pieces(self) -> Path:
        """The folder of compiled pieces."""
        return self.folder / "pieces"

    @property
    def libraries(self) -> Libraries:
        """Those of a CPU's kernels. Raises ArtifactError where prebuilt ones are missing."""
        return libraries_of(self.folder, self.program.libraries)

    @property
    def is_portable(self) -> bool:
        """Whether it calls nothing but prebuilt kernels: then it runs wherever these are."""
        return self.config.backend == "prebuilt" and not self.program.torch

    @property
    def is_baked(self) -> bool:
        """Whether it holds its weights."""
        return baked_table.is_baked(self.folder)

    @functools.cached_property
    def program(self) -> Program:
        """Its programs. Raises ArtifactError."""
        try:
            return read_program(self.folder)
        except (OSError, msgspec.MsgspecError) as other:
            raise ArtifactError(
                f"{self.folder / 'program.json'} is another version's ({other}); compile again"
            ) from other

    @functools.cached_property
    def weights(self) -> str:
        """The weight plan, as JSON."""
        return (self.folder / "weights.json").read_text()

    def check_machine(self) -> None:
        """Raise ArtifactError unless it was made for this machine and these versions."""
        factors = self.manifest.factors
        compiled = factors.compile.target
        if self.is_portable:
            if lacking := sorted({*compiled.arch} - {*detect_target("cpu").arch}):
                raise ArtifactError(f"{self.folder} needs a CPU with {', '.join(lacking)}; compile again")
            return
        try:
            target = detect_target(compiled.device)
        except ConfigError as none:
            made_for = " ".join([compiled.device, *compiled.arch])
            raise ArtifactError(f"{self.folder} was made for {made_for}, which is not here; compile again") from none
        here = {"versions": versions(target), "target": {"device": target.device, "arch": list(target.arch)}}
        there = {"device": compiled.device, "arch": list(compiled.arch)}
        called = {name: v for name, v in factors.versions.items() if name != "transformers"}  # which made it
        found = differences(here, {"versions": called, "target": there})
        if found:
            raise ArtifactError(
                f"{self.folder} was made for another machine or version; compile again. {'; '.join(found)}"
            )

    def check_model(self, model_config: Mapping[str, Any], tensors: str | None) -> None:
        """Raise ArtifactError unless it was made for this config.json and these tensors; None: for any."""
        factors = self.manifest.factors
        found = differences(_computing(model_config), factors.model, "config.json")
        if tensors is not None and factors.checkpoint != tensors:
            found.append("checkpoint: tensor names, shapes or dtypes differ")
        if found:
            raise ArtifactError(f"{self.folder} was made for another model; compile again. {'; '.join(found)}")


def libraries_of(folder: Path, prebuilt: Sequence[str]) -> Libraries:
    """The libraries of a CPU's kernels: an artifact's own, and prebuilt ones by their names. Raises ArtifactError where
    one of those is missing."""
    own, found = folder / KERNELS, {name: find_library(name) for name in prebuilt}
    if missing := [name for name, file in found.items() if file is None]:
        raise ArtifactError(
            f"{folder} runs on prebuilt kernels, and {missing[0]} is not here; compile again, with --artifact rebuild"
        )
    return Libraries([*([own] if own.exists() else []), *(file for file in found.values() if file is not None)])
