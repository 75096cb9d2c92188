"""Exchange memory: by which kernels of several GPUs give each other numbers, each writing into the others' memory.

Every rank has a buffer with a slot for each rank that gives it something, twice: calls take turns with the two halves.
A slot is full of ones, in bits, where nothing has arrived; who reads a number puts the ones back. So a kernel needs no
signal in addition to the numbers, waits for slower ranks, and can be captured: what a call needs to know, which half it
uses, is counted on the device. `graphllm.ops.collectives.all_reduce.triton_exchange` has the kernels' side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from graphllm.ir.groups import TENSOR, joined_group
from graphllm.ir.kernels import C_NAMESPACE

EXCHANGE_WORDS = 64  # int64, of a table
# Where in a table: calls; this rank; where to write for each peer; where each peer writes.
COUNTER, OWN, GIVE, TAKE = 0, 1, 16, 40
MOST_RANKS = TAKE - GIVE


def exchange_bytes(ranks: int) -> int:
    """Bytes that each rank may give another one in a call: as many as kernels were measured with
    (all_reduce.json of bench/results/h200-x2 and h100-x4)."""
    return 4 << 20 if ranks == 2 else 16 << 20


def buffer_bytes(ranks: int) -> int:
    """Of a rank's buffer."""
    return 2 * ranks * exchange_bytes(ranks)


def exchange_table(rank: int, buffers: Sequence[int], device: torch.device) -> Tensor:
    """What kernels of a rank read, int64 [EXCHANGE_WORDS]: addresses in the buffers, which are given by their addresses
    in this process, by rank. With two ranks only the peer has a place; with more every rank has one, this one too, in
    the order of the sum."""
    ranks = len(buffers)
    peers = [1 - rank] if ranks == 2 else range(ranks)
    words, slot = [0] * EXCHANGE_WORDS, exchange_bytes(ranks)
    words[OWN] = rank
    for place, peer in enumerate(peers):
        words[GIVE + place] = buffers[peer] + rank * slot
        words[TAKE + place] = buffers[rank] + peer * slot
    return torch.tensor(words, dtype=torch.int64, device=device)


@functools.cache
def _alone(ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A table for a process without the others, where kernels are built and timed: what it gives a peer comes back as
    that peer's. It is none of the ranks, so it never waits for what it would have to give itself. The buffer lives as
    long."""
    buffer = torch.full((buffer_bytes(ranks),), 255, dtype=torch.uint8, device=device)
    table = exchange_table(0, [buffer.data_ptr()] * ranks, device)
    table[OWN] = -1
    table[GIVE:TAKE] = table[TAKE : TAKE + MOST_RANKS]
    return table, buffer


@torch.library.custom_op(f"{C_NAMESPACE}::exchange", mutates_args=())
def exchange(like: Tensor, ranks: int) -> Tensor:
    """The table of this process in the tensor-parallel group of ``ranks`` ranks, on the device of ``like``, for a
    kernel that counts in it. In an artifact it is that of the group that runs it."""
    group = joined_group(TENSOR)
    if group is None or group.size != ranks or group.exchange is None:
        return _alone(ranks, like.device)[0][:]
    return group.exchange[:]


@exchange.register_fake
def _(like: Tensor, ranks: int) -> Tensor:
    return torch.empty(EXCHANGE_WORDS, dtype=torch.int64, device=like.device)
