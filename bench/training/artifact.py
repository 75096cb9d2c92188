"""The artifact of prebuilt kernels that ships with the embedded model: `python -m bench.training.artifact`.

It is made again whenever its kernels, or the programs that call them, change; a test says so.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from graphllm.compile.pipeline import compile_model
from graphllm.config import EngineArgs
from graphllm.embedded import ARTIFACT_DIR
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import find_source

ARCH = ("avx2", "x86_64")  # the least that kernels are chosen for


def make(folder: Path) -> Path:
    """Compile into a folder, with the settings that nobody has said otherwise."""
    args = EngineArgs(target="cpu", backend="prebuilt")
    source = find_source(args)
    config = compile_config(source.config, args)
    config = replace(config, target=replace(config.target, arch=ARCH, name="any"))
    stored = source.checkpoint.tensors if source.checkpoint else None
    origin = {"name": source.name, "commit": None}

    def without_graph(building: Path) -> None:
        shutil.rmtree(building / "graph")  # for people, who find it in an artifact of their own

    return compile_model(
        source.config, source.tensors, config, folder, complete=without_graph, origin=origin, stored=stored
    )


def main() -> None:
    """Put it into the package."""
    with tempfile.TemporaryDirectory() as scratch:
        made = make(Path(scratch) / "artifact")
        shutil.rmtree(ARTIFACT_DIR, ignore_errors=True)
        shutil.copytree(made, ARTIFACT_DIR)


if __name__ == "__main__":
    main()
