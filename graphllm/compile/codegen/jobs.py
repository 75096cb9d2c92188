"""What build processes are asked, and what they answer: plain data, which crosses a socket as msgpack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from graphllm.config import Bucket
from graphllm.ir.graph import TensorSpec
from graphllm.rewrite import ImplChoice


class Built(NamedTuple):
    """One piece for one bucket.

    bundle: the piece file's JSON.
    sources: C++ text by symbol.
    blobs: further files by name.
    chosen: which implementation each op got.
    text: the lowered graph, for ``--dump``.
    reports: of the passes that rewrote the piece for the bucket.
    """

    bundle: dict[str, Any]
    sources: dict[str, str]
    blobs: dict[str, bytes]
    chosen: tuple[str, ...]
    text: str
    reports: Sequence[dict[str, Any]] = ()


class Build(msgspec.Struct, tag=True):
    """Build a piece, given by its canonical JSON, for a bucket; see `Backend.build`. The answer is a `Built`."""

    piece: dict[str, Any]
    bucket: Bucket
    choices: dict[str, ImplChoice]


class Tunable(NamedTuple):
    """A site with more than one candidate.

    tensors, plain: the arguments that are tensors, and the others.
    sizes: T and S to run at.
    deterministic: see `CallSite`; what is the fastest of some candidates only is not the fastest of all.
    """

    op: str
    tensors: dict[str, TensorSpec]
    plain: dict[str, Any]
    sizes: dict[str, int]
    candidates: list[ImplChoice]
    deterministic: bool = False


class Find(msgspec.Struct, tag=True):
    """Find the sites to tune in a piece, given by its canonical JSON, at a bucket. The answer is each by its key."""

    piece: dict[str, Any]
    bucket: Bucket


class Candidate(msgspec.Struct, tag=True):
    """Compile the kernels of an implementation that tuning may choose at a site, into Triton's cache. The answer is why
    they cannot be compiled, or nothing."""

    site: Tunable
    choice: ImplChoice


class Failed(msgspec.Struct, tag=True):
    """A job that raised.

    kind: of the error.
    trace: where.
    """

    kind: Literal["config", "build", "other"]
    message: str
    trace: str


class Done(msgspec.Struct, tag=True):
    """A job's answer: a `Built`, or why a candidate cannot be compiled, empty where it can, or sites."""

    built: Built | None = None
    problem: str = ""
    sites: dict[str, Tunable] = {}


def takes_torch(built: Iterable[Built], folder: Path) -> bool:
    """Whether an artifact's programs run on torch, not only on kernels. folder: of its pieces."""
    library = folder / "kernels.so"
    if any(instruction[0] in _OF_TORCH for b in built for instruction in b.bundle["code"]):
        return True
    return library.exists() and b"libtorch" in library.read_bytes()  # among the libraries that it needs


_OF_TORCH = ("op", "call", "ir", "extern")  # instructions of pieces
