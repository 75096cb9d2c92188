"""What build processes are asked, and what they answer: plain data, which crosses a socket as msgpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from graphllm.config import Bucket
from graphllm.ir.graph import TensorSpec
from graphllm.rewrite import ImplChoice


class Built(NamedTuple):
    """One piece for one bucket. bundle: the piece file's JSON. sources: C++ text by symbol. blobs: further files by
    name. chosen: which implementation each op got. text: the lowered graph, for ``--dump``. reports: of the passes that
    rewrote the piece for the bucket."""

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


class Candidate(msgspec.Struct, tag=True):
    """Compile the kernels of an implementation that tuning may choose, into Triton's cache; see
    `graphllm.compile.tune.Tunable`. tensors, plain: the arguments that are tensors, and the others. The answer is why
    they cannot be compiled, or nothing."""

    op: str
    tensors: dict[str, TensorSpec]
    plain: dict[str, Any]
    sizes: dict[str, int]
    choice: ImplChoice


class Failed(msgspec.Struct, tag=True):
    """A job that raised. kind: of the error. trace: where."""

    kind: Literal["config", "build", "other"]
    message: str
    trace: str


class Done(msgspec.Struct, tag=True):
    """A job's answer: a `Built`, or why a candidate cannot be compiled, empty where it can."""

    built: Built | None = None
    problem: str = ""
