"""What a block of the cache depends on, in addition to its tokens: files of another identity are never read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from graphllm.config import CompileConfig, key_fields
from graphllm.program import baked_table
from graphllm.program.artifact import Artifact, key_of
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading.baked_on_host import sample

FORMAT = 1  # of what a file holds: the tensors of a pool one after another
# Settings of the compiler that change no block, with the reason. Everything else is in the identity.
EXCLUDED = {
    "backend": "code of both backends writes the same numbers up to rounding, and an engine changes it while it runs",
    "buckets": "how steps are divided",
    "max_num_seqs": "how many sequences share a step",
    "max_num_batched_tokens": "how steps are divided",
    "max_logprobs": "of what is sampled",
    "max_logit_bias": "of what is sampled",
    "count_expert_tokens": "it only counts",
    "max_loras": "how many adapters share a step; a block's digest has its adapter",
    "dynamic_speculative_tokens": "how many drafts are verified",
    "draft_sample_method": "which drafts are made",
    "rejection_sample_method": "which drafts are accepted",
    "posterior_threshold": "which drafts are accepted",
    "posterior_alpha": "which drafts are accepted",
    "synthetic_acceptance_rate": "which drafts are accepted",
    "tune": "which kernels are chosen",
    "tune_all": "which kernels are chosen",
}
_BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's cache names large files by the SHA-256 of their contents


def cache_identity(artifact: Artifact, checkpoint: Checkpoint | None, stages: int) -> dict[str, Any]:
    """All that a block depends on, as JSON has it.

    checkpoint: the tensors of the model and of a draft model; None for random weights, and not asked for where the
        artifact holds the weights.
    stages: of the pipeline.
    """
    factors, program = artifact.manifest.factors, artifact.program
    found = {
        "format": FORMAT,
        "graphllm": factors.graphllm,
        "plugins": factors.plugins,
        "model": factors.model,
        "tensors": factors.checkpoint,
        "weights": _baked(artifact) if artifact.is_baked else _stored(checkpoint),
        "compile": computing_settings(factors.compile),
        "blocks": msgspec.to_builtins(program.blocks),
        "snapshot bytes": program.snapshot_bytes,
        "stages": stages,
    }
    if factors.compile.deterministic:  # rounding is a part of what is promised
        found["artifact"] = key_of(factors)
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def computing_settings(config: CompileConfig) -> dict[str, object]:
    """The settings that change what blocks hold."""
    return {name: value for name, value in key_fields(config).items() if name not in EXCLUDED}


def identity_key(identity: Mapping[str, Any]) -> str:
    """The name of a folder with files of this identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _baked(artifact: Artifact) -> list[Any]:
    """The table has the digest of all parameters."""
    return ["baked", artifact.manifest.files[baked_table.TABLE][1]]


def _stored(checkpoint: Checkpoint | None) -> list[Any]:
    """What tells a checkpoint from another one with the same tensors, such as a fine-tune, without reading gigabytes: a
    little of every tensor, and of every file the SHA-256 that the hub's cache names it by, or else when it was written.
    A copy of a checkpoint may count as another model; another model never counts as this one."""
    if checkpoint is None:
        return ["random"]
    files = sorted({info.file for info in checkpoint.tensors.values()})
    return ["files", sample(checkpoint), [_file_facts(file) for file in files]]


def _file_facts(file: Path) -> list[Any]:
    real = file.resolve()
    if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
        return [file.name, real.name]
    found = real.stat()
    return [file.name, found.st_size, found.st_mtime_ns]
