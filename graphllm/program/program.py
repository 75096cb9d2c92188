"""``program.json``: the programs of an artifact, with all that loading and scheduling must know of them. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from graphllm.config import Bucket, CompileConfig
from graphllm.program.linking import MemoryPlan
from graphllm.program.schema import CacheGroup, CacheLayout, ExpertLayout
from graphllm.program.specs import InputSpec
from graphllm.program.states import StatePlace

FILE = "program.json"


class ProgramCall(NamedTuple):
    """One run of a piece.

    piece: its id.
    inputs: the program values that it reads, in the piece's order.
    outputs: the program values that it makes, in the piece's order.
    """

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class GraphProgram(msgspec.Struct, frozen=True):
    """One order of calls of a graph's pieces.

    calls: in their order.
    parts: index of the first call of each part after the first one, "". Parts run one by one.
    results: the values that must be there in the end.
    host: the results that every run copies to the host: one row for each T, S or R, or a number of rows.
    memory: where its intermediates lie, by the bucket's name.
    """

    calls: tuple[ProgramCall, ...]
    parts: dict[str, int]
    results: tuple[str, ...]
    host: dict[str, str | int]
    memory: dict[str, MemoryPlan]


class ProgramGraph(msgspec.Struct, frozen=True):
    """A graph of the model: decoder, encoder or draft head.

    name, task: as the model family declares them.
    inputs: arrays of a step that it reads.
    buckets: the sizes that it is compiled for.
    optional: inputs without which its programs exist a second time, with `NEUTRAL` appended to their names.
    programs: by name.
    """

    name: str
    task: str
    inputs: dict[str, InputSpec]
    buckets: tuple[Bucket, ...]
    optional: tuple[str, ...]
    programs: dict[str, GraphProgram]


class BlockPool(msgspec.Struct, frozen=True):
    """The pool of cache blocks.

    groups: of layers that share block tables.
    tensors: how many the pool has; each layer of a group lies in one.
    bytes: of one block in one tensor.
    """

    groups: tuple[CacheGroup, ...]
    tensors: int
    bytes: int


class DraftReach(msgspec.Struct, frozen=True):
    """What the host must know of a draft graph; all zero without one.

    lookahead: positions after a step's tokens that it writes.
    next_seen: what it keeps of a token depends on the next token, too.
    one_row_more: its first run has one row more than the step's tokens for each sequence.
    at_once: drafts that its only run makes; 0 where each run makes one.
    by_levels: its runs fill a tree level by level.
    block: rows of each sequence in the one run that makes all drafts.
    """

    lookahead: int = 0
    next_seen: bool = False
    one_row_more: bool = False
    at_once: int = 0
    by_levels: bool = False
    block: int = 0


class Program(msgspec.Struct, frozen=True):
    """All of ``program.json``.

    graphs: the decoder or embedder first.
    states: where each state lies, by name.
    blocks: the pool of the block states.
    entries: by axis, how many entries the other states have; "recurrent": slots of recurrent states.
    exports: entries of recurrent states after those of the slots, in which steps leave states for snapshots.
    shareable: cached states of a prefix are valid whatever follows it.
    vector: of a pooling model, the symbol of its rows and its width.
    drafts: of the draft graph.
    adapted: the linear layers that have tables of adapters, for `graphllm.weights.adapters.adapted.linear_from`.
    experts: that move between ranks; None where none do.
    vocab: tokens.
    torch: running it needs torch.
    libraries: names of the prebuilt libraries that its kernels are in.
    slot_bytes: of one version of all recurrent states of a slot, which lie side by side.
    snapshot_bytes: of one snapshot of them.
    """

    graphs: tuple[ProgramGraph, ...]
    states: dict[str, StatePlace]
    blocks: BlockPool
    entries: dict[str, int]
    shareable: bool
    vector: tuple[str, int]
    drafts: DraftReach
    adapted: list[Any]
    experts: ExpertLayout | None
    vocab: int
    torch: bool = True
    libraries: tuple[str, ...] = ()
    slot_bytes: int = 0
    snapshot_bytes: int = 0
    exports: int = 0

    @property
    def recurrent(self) -> bool:
        """Whether slots have states that must be zeroed or restored when a sequence enters."""
        return any(place.retention == "last" for place in self.states.values())

    def cache_layout(self, config: CompileConfig, num_blocks: int, num_snapshots: int) -> CacheLayout:
        """The states as the cache manager sees them."""
        history = self.states.get("state.history")
        return CacheLayout(
            groups=self.blocks.groups,
            num_blocks=num_blocks,
            recurrent=self.recurrent,
            num_snapshots=num_snapshots,
            exports=tuple(range(self.entries["slot"], self.entries["slot"] + self.exports)),
            item_tokens=self.entries["item"] - 1,
            max_adapters=self.entries["adapter"] - 1,
            query_lens=tuple(sorted({b.query_len for b in config.buckets} - {1})),
            history=0 if history is None else history.shape[0],
            lookahead=self.drafts.lookahead,
            next_seen=self.drafts.next_seen,
            tree=config.tree,
        )

    def write(self, folder: Path) -> None:
        """Write ``program.json``."""
        (folder / FILE).write_text(json.dumps(msgspec.to_builtins(self), indent=1))


def read_program(folder: Path) -> Program:
    """The content of an artifact's ``program.json``. Raises msgspec.ValidationError for another version's."""
    return msgspec.json.decode((folder / FILE).read_bytes(), type=Program)
