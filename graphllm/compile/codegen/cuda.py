"""The CUDA backend: Inductor's Triton kernels and our own, tuned at compile time and kept as cubins.

Inductor is imported with the first piece: where other processes build, this one has no need of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphllm.compile.codegen.example_inputs import example
from graphllm.compile.codegen.file_locks import turn
from graphllm.compile.codegen.jobs import Built
from graphllm.compile.codegen.stand_in import standing_in
from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph_form import input_specs
from graphllm.rewrite import ImplChoice

if TYPE_CHECKING:
    from graphllm.compile.codegen.backends import Generated

_TUNING_SEQUENCES = 8  # of mixed buckets
_TUNING_SIZE = 512  # what kernels of a dynamic bucket are tuned at: tokens, sequences in decode


class Cuda:
    """Builds on the GPU it compiles for: generated kernels with several configurations are timed there."""

    def __init__(self, turns: Path | None = None) -> None:
        """turns: of processes that use the GPU at the same time, see `graphllm.compile.codegen.file_locks`."""
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
        for name, made in self._cubins(generated, piece, bucket, config).items():
            cubin = made.pop("cubin")
            file = f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
            blobs[file] = cubin
            kernels[name] = {**made, "cubin": file}
        return generated.built(kernels, {}, blobs)

    def _cubins(
        self, generated: Generated, piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig
    ) -> dict[str, Any]:
        """See `inductor.cubins`. A piece with only our kernels is not run: it may need other processes."""
        from graphllm.compile.codegen import inductor
        from graphllm.compile.codegen.cubins import described, described_gluon

        calls = generated.bundle.kernels
        names = {name: k["generated"] for name, k in calls.items() if "generated" in k}
        ours = {name: described(k, config.target, self._turns) for name, k in calls.items() if "call" in k}
        ours |= {name: described_gluon(k, config.target, self._turns) for name, k in calls.items() if "gluon" in k}
        if not names:
            return ours
        module = inductor.load_module(generated.source)
        usual = replace(bucket, hi=max(bucket.lo, min(bucket.hi, _TUNING_SIZE)))
        sizes = usual.limits(min(config.max_num_seqs, _TUNING_SEQUENCES))
        with turn(self._turns, exclusive=False), standing_in(config.tensor_parallel_size, config.data_parallel_experts):
            examples = [example(s, sizes) for s in input_specs(piece)]
            sizes_given = [sizes[name] for name in generated.hidden]
            return ours | inductor.cubins(module, [*examples, *sizes_given], names)

    def assemble(self, built: Iterable[Built], folder: Path) -> tuple[str, ...]:
        """Nothing is shared: every piece names its cubins."""
        return ()
