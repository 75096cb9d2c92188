"""What the host must know of a compiled model's states to schedule for it, as plain data. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from graphllm.config.token_tree import DynamicTree, TokenTree

BORDER = 64  # tokens of a step, at multiples of which kernels export recurrent states
NEUTRAL = ".neutral"  # suffix of a program's name: the version for steps with all optional inputs neutral


class CacheGroup(NamedTuple):
    """Layers that share block tables.

    retention: "full" keeps all of a sequence, "window" the last ``window`` tokens.
    window: tokens, 0 for full.
    block_size: tokens of a block, a power-of-two multiple of the smallest group's.
    """

    retention: Literal["full", "window"]
    window: int
    block_size: int


class ExpertLayout(msgspec.Struct, frozen=True):
    """Experts that may move between ranks while serving.

    experts: of each layer.
    slots: places of experts and copies, an equal number on each rank, rank 0's first.
    ranks: that share the slots.
    layers: by number, the weights that are divided among slots along their first dimension.
    bytes: of the largest layer's slot.
    """

    experts: int
    slots: int
    ranks: int
    layers: dict[int, list[str]]
    bytes: int

    @property
    def slots_of_rank(self) -> int:
        return self.slots // self.ranks


class CacheLayout(NamedTuple):
    """The states of a loaded model, as the cache manager sees them.

    groups: of block states.
    num_blocks: blocks of the pool that all groups share; no sequence has block 0.
    recurrent: slot states exist that must be rebuilt or restored from a snapshot.
    num_snapshots: copies of recurrent states.
    exports: entries of recurrent states that a step may export states to from inside of its chunks.
    border: the state of a chunk can be exported after the last multiple of so many tokens that others follow.
    item_tokens: rows of item states.
    max_adapters: entries of adapter states, without the neutral one.
    query_lens: tokens that a sequence may have in a verification step; empty without verification.
    history: tokens of a sequence that its slot remembers.
    lookahead: positions after a step's tokens that a draft graph writes.
    next_seen: the draft graph's state of a token depends on the next token, too.
    tree: of the drafts that steps verify, None where they are one run.
    """

    groups: tuple[CacheGroup, ...]
    num_blocks: int
    recurrent: bool = False
    num_snapshots: int = 0
    exports: tuple[int, ...] = ()
    border: int = BORDER
    item_tokens: int = 0
    max_adapters: int = 0
    query_lens: tuple[int, ...] = ()
    history: int = 0
    lookahead: int = 0
    next_seen: bool = False
    tree: TokenTree | DynamicTree | None = None

    @property
    def stateless(self) -> bool:
        """Whether nothing is kept of a sequence between steps, so that its prompt is computed in one."""
        return not self.groups and not self.recurrent

    def ahead(self, query_len: int) -> int:
        """By how many tokens a sequence advances at most. query_len: its rows in the step."""
        return query_len if self.tree is None or query_len == 1 else self.tree.levels + 1

    @property
    def block_size(self) -> int:
        """Tokens between two digests of a prefix: a block of the smallest group, 16 without groups."""
        return min((g.block_size for g in self.groups), default=16)
