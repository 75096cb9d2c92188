"""The CUDA backend: Inductor's Triton kernels and our own as cubins. Building runs none of them.

Inductor is imported with the first piece: where other processes build, this one has no need of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphllm.compile.codegen.jobs import Built
from graphllm.config import Bucket, CompileConfig
from graphllm.rewrite import ImplChoice

if TYPE_CHECKING:
    from graphllm.compile.codegen.backends import Generated


class Cuda:
    """Builds for a GPU."""

    def __init__(self, turns: Path | None = None) -> None:
        """turns: of processes that compile at the same time, see `graphllm.compile.codegen.file_locks`."""
        self._turns = turns

    def prepare(self) -> None:
        """Import Inductor, which lasts seconds."""
        import graphllm.compile.codegen.backends  # noqa: F401
        from graphllm.compile.codegen import inductor

        inductor.prepare()

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
    ) -> Built:
        from graphllm.compile.codegen.backends import generate

        known: dict[str, Generated] = {}  # what Triton kernels look like depends on the bucket's size too
        generated = generate(piece, bucket, config, choices, known)
        kernels, blobs = {}, {}
        for name, call in generated.bundle.kernels.items():
            made = self._described(call, config)
            cubin = made.pop("cubin")
            file = f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
            blobs[file] = cubin
            kernels[name] = {**made, "cubin": file}
        return generated.built(kernels, {}, blobs)

    def _described(self, call: Mapping[str, Any], config: CompileConfig) -> dict[str, Any]:
        """A kernel of a `Bundle`, compiled, as a launch needs it."""
        from graphllm.compile.codegen import inductor
        from graphllm.compile.codegen.cubins import described, described_gluon

        if "generated" in call:
            return inductor.cubin(call["generated"], call["source"])
        if "gluon" in call:
            return described_gluon(call, config.target, self._turns)
        return described(call, config.target, self._turns)

    def assemble(self, built: Iterable[Built], folder: Path) -> tuple[str, ...]:
        """Nothing is shared: every piece names its cubins."""
        return ()
