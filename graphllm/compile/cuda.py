"""The CUDA backend: Inductor's Triton kernels and our own, tuned at compile time and kept as cubins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphllm.compile import gluon, inductor
from graphllm.compile.backends import Built, Generated, generate
from graphllm.compile.stand_in import standing_in
from graphllm.config import Bucket, CompileConfig
from graphllm.expr import value
from graphllm.ir.graph import TensorSpec, input_specs
from graphllm.rewrite import ImplChoice

_TUNING_SEQUENCES = 8  # of mixed buckets
_TUNING_SIZE = 512  # what kernels of a dynamic bucket are tuned at: tokens, sequences in decode


class Cuda:
    """Builds on the GPU it compiles for: generated kernels with several configurations are timed there."""

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
    ) -> Built:
        known: dict[str, Generated] = {}  # what Triton kernels look like depends on the bucket's size too
        generated = generate(piece, bucket, config, choices, known)
        usual = replace(bucket, hi=max(bucket.lo, min(bucket.hi, _TUNING_SIZE)))
        sizes = usual.limits(min(config.max_num_seqs, _TUNING_SEQUENCES))
        calls = generated.bundle.kernels
        names = {name: k["triton"] for name, k in calls.items() if "triton" in k}
        examples = [example(s, sizes) for s in input_specs(piece)]
        kernels, blobs = {}, {}
        hidden = [sizes[name] for name in generated.hidden]
        with standing_in(config.tensor_parallel_size):
            found = inductor.cubins(generated.source, [*examples, *hidden], names)
        found |= {name: gluon.described(k, config.target) for name, k in calls.items() if "gluon" in k}
        for name, made in found.items():
            cubin = made.pop("cubin")
            file = f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
            blobs[file] = cubin
            kernels[name] = {**made, "cubin": file}
        return generated.built(kernels, {}, blobs)

    def assemble(self, built: Iterable[Built], folder: Path) -> None:
        """Nothing is shared: every piece names its cubins."""


def example(spec: TensorSpec, sizes: Mapping[str, int], device: str = "cuda") -> torch.Tensor:
    """An input to run on: random numbers, and zeros for integers, which are ids and offsets."""
    shape, stride = ([value(d, sizes) for d in dims] for dims in (spec.shape, spec.stride))
    made = torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=device)
    if not made.is_floating_point():
        return made.zero_()
    if made.itemsize == 1:  # torch draws no numbers of 8 bits
        return made.copy_(torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.05))
    return made.normal_(0.0, 0.05)
