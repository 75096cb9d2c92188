"""Baked weights without torch: whether they are a checkpoint's, and what maps them (see
`graphllm.weights.loading.baked`)."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

import numpy as np

from graphllm.program.baked_table import AGAIN, DATA, BakedError, check, read_table
from graphllm.weights.checkpoint.checkpoint import Checkpoint, fingerprint
from graphllm.weights.loading.host_array import HostArray

_SAMPLE = 1024  # bytes of each tensor that tell checkpoints apart


def sample(checkpoint: Checkpoint) -> str:
    """SHA-256 over a little from the middle of every tensor: what tells two checkpoints of one shape apart, without
    reading gigabytes."""
    found = hashlib.sha256()
    files: dict[Path, int] = {}
    try:
        for name, info in sorted(checkpoint.tensors.items()):
            if info.file not in files:
                files[info.file] = os.open(info.file, os.O_RDONLY)
            start = max(0, info.nbytes // 2 - _SAMPLE // 2)
            read = os.pread(files[info.file], min(_SAMPLE, info.nbytes - start), info.offset + start)
            found.update(name.encode() + b"\0" + read)
    finally:
        for fd in files.values():
            os.close(fd)
    return found.hexdigest()


def check_source(artifact: Path, checkpoint: Checkpoint) -> None:
    """Raise BakedError unless the weights were made of this checkpoint, as far as a sample of it shows."""
    table = read_table(artifact)
    if table["checkpoint"] != fingerprint(checkpoint):
        raise BakedError(f"{artifact / DATA} was made of another model than {checkpoint.folder}; {AGAIN}")
    if table["sample"] != sample(checkpoint):
        raise BakedError(
            f"{artifact / DATA} was made of other weights than those in {checkpoint.folder}, which have the same "
            f"shapes; {AGAIN}"
        )


def open_on_host(artifact: Path) -> dict[str, HostArray]:
    """The parameters by name on a CPU: the file itself, mapped for reading only and shared with other processes.
    Parameters that share memory do so here. Raises BakedError as `check` does."""
    places = check(artifact)["tensors"]
    whole = np.frombuffer(mapped(artifact), np.uint8)
    return {name: HostArray.of(whole[p["offset"] :], p["shape"], p["dtype"]) for name, p in places.items()}


def mapped(artifact: Path) -> mmap.mmap:
    """The data of an artifact, for reading only."""
    with (artifact / DATA).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
