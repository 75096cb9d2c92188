"""``manifest.json``: what an artifact was made of, what it holds, and what it needs. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from graphllm.config import CompileConfig


class MemoryTable(msgspec.Struct, frozen=True):
    """Memory that the artifact takes, in bytes.

    weights: the parameters.
    arena: intermediates of the largest step.
    arenas: the same for each bucket and program.
    zeroed: int32 counters that kernels share; a number of them, not bytes.
    state: all states but blocks.
    snapshot: one snapshot of recurrent states.
    block: one cache block, in all tensors of the pool.
    token: of the cache for each token.
    blocks_of_sequence: blocks of the longest sequence; a number.
    unused_of_block: bytes of a block that no layer uses.
    messages: of a pipeline's stage.
    state_of_sequence: of the states, what each sequence of a step has.
    """

    weights: int
    arena: int
    arenas: dict[str, int] = msgspec.field(name="arena by bucket")
    zeroed: int
    state: int
    snapshot: int
    block: int
    token: int = msgspec.field(name="cache bytes a token")
    blocks_of_sequence: int = msgspec.field(name="blocks of a sequence")
    unused_of_block: int = msgspec.field(name="unused of a block")
    messages: int = 0
    state_of_sequence: int = msgspec.field(name="state of a sequence", default=0)


class Factors(msgspec.Struct, frozen=True):
    """What the artifact key is made of.

    format: of the artifact's files.
    graphllm: version and digest of the compiler's source.
    plugins: installed ones, with digests.
    versions: of libraries that generated code depends on.
    compile: the settings. What is not in the key has its default.
    model: config.json, without what only names things.
    checkpoint: digest of the tensors' names, shapes and dtypes.
    """

    format: int
    graphllm: dict[str, str]
    plugins: dict[str, str]
    versions: dict[str, str]
    compile: CompileConfig
    model: dict[str, Any]
    checkpoint: str


class Cost(msgspec.Struct, frozen=True):
    """What a step must at least do.

    bytes: read and written.
    flops: operations of products.
    """

    bytes: float
    flops: float


class OrdinaryOps(msgspec.Struct, frozen=True):
    """Calls of a traced model that became no op of graphllm; Inductor compiles them.

    unit: embed, head, or the name of a layer type.
    what: the call, such as "aten.bmm".
    why: what it would have been, or why it stays.
    times: how often a step runs it, in all layers of the type.
    share: of the bytes that a step of one token reads and writes apart from the cache; None where that is not known.
    """

    unit: str
    what: str
    why: str
    times: int
    share: float | None = None


class Implementation(msgspec.Struct, frozen=True):
    """Whose code defines the model.

    name: a file of model_defs, a plugin's module, or transformers' class.
    transformers: whether it was traced from that.
    ordinary: what then stayed; empty where all became ops.
    """

    name: str
    transformers: bool = False
    ordinary: tuple[OrdinaryOps, ...] = ()

    def __str__(self) -> str:
        if not self.transformers:
            return self.name
        count = sum(found.times for found in self.ordinary)
        return f"transformers' {self.name}, " + (
            f"{count} of its ops stay ordinary ones" if count else "all as own ops"
        )


class Manifest(msgspec.Struct, frozen=True):
    """All of ``manifest.json``.

    factors: what the key is made of.
    origin: name of the model, commit of its repository.
    implementation: whose code defines the model.
    unread: fields of config.json that nothing read.
    passes: a report of each pass on each unit.
    pieces: by piece and bucket, the kernels that were chosen.
    weights: how each weight is kept.
    memory: what it takes.
    cost: of a step, by bucket and program.
    seconds: of each stage of the compilation.
    tuning: what was timed.
    compilers: seconds of C++ compilers.
    made_with: the compiler and the machine.
    files: size and SHA-256 of each file.
    """

    factors: Factors
    origin: dict[str, str | None]
    implementation: Implementation
    unread: list[str]
    passes: list[dict[str, Any]]
    pieces: dict[str, dict[str, list[str]]]
    weights: list[dict[str, Any]]
    memory: MemoryTable
    cost: dict[str, Cost]
    seconds: dict[str, float]
    tuning: dict[str, float]
    compilers: dict[str, float]
    made_with: dict[str, str]
    files: dict[str, tuple[int, str]] = {}
