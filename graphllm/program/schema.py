"""What the host must know of a compiled model's states to schedule for it, as plain data. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from graphllm.config.token_tree import DynamicTree, TokenTree

NEUTRAL = ".neutral"  # behind a program's name: the one for steps in which optional inputs are neutral throughout


class CacheGroup(NamedTuple):
    """Layers whose block states share block tables.

    retention: "full" keeps all of a sequence, "window" the last ``window`` tokens (0 for full). block_size: tokens of a
    block, a power-of-two multiple of the smallest group's.
    """

    retention: Literal["full", "window"]
    window: int
    block_size: int


class ExpertLayout(msgspec.Struct, frozen=True):
    """Experts that may move between ranks while serving.

    experts: of each layer. slots: where they and copies of them lie, an equal number on each of ``ranks``, rank 0's
    first. layers: by number, the weights that a slot has a part of, along their first dimension. bytes: of the largest
    layer's slot.
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

    groups: of block states; all draw blocks from one pool of ``num_blocks``, of which block 0 is no sequence's.
    recurrent: there are slot states that must be rebuilt or restored from one of ``num_snapshots`` copies. item_tokens:
    rows of item states. max_adapters: entries of adapter states beside the neutral one. query_lens: tokens a sequence
    that verification steps may have, none without. history: tokens of a sequence that its slot remembers.
    lookahead: positions behind a step's tokens that a draft graph writes. next_seen: what it keeps of a token depends
    on the one behind it, too. tree: of the drafts that steps verify, None where they are one run.
    """

    groups: tuple[CacheGroup, ...]
    num_blocks: int
    recurrent: bool = False
    num_snapshots: int = 0
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
        """By how many tokens a sequence with so many rows in a step moves on at most."""
        return query_len if self.tree is None or query_len == 1 else self.tree.levels + 1

    @property
    def block_size(self) -> int:
        """Tokens by which beginnings are told apart: those of the smallest group's blocks, 16 where there are none."""
        return min((g.block_size for g in self.groups), default=16)
