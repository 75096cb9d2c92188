"""Ragged batches over a paged cache, for cases of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphllm.ir.testing import Maker

Sequences = Sequence[tuple[int, int]]  # query tokens of each, and its length including them


def ragged_batch(make: Maker, sequences: Sequences, block_size: int) -> tuple[int, dict[str, Tensor]]:
    """How many blocks a cache has, and where sequences are in it. Unused entries of the table point at a block that
    nobody owns."""
    blocks = [-(-length // block_size) for _, length in sequences]
    total, columns = sum(blocks) + 2, max(1, *blocks) + 1
    order = torch.randperm(total, generator=make.generator, device=make.generator.device).to(torch.int32).cpu()
    table = torch.full((len(sequences), columns), int(order[-1]), dtype=torch.int32)
    used = 0
    for s, n in enumerate(blocks):
        table[s, :n] = order[used : used + n]
        used += n
    starts = [0]
    for n, _ in sequences:
        starts.append(starts[-1] + n)
    return total, {
        "block_table": table.to(make.device),
        "query_start_loc": make.tensor(starts, torch.int32),
        "seq_lens": make.tensor([length for _, length in sequences], torch.int32),
    }


def tree_bits(make: Maker, sequences: Sequences, tree: Sequence[int], pad: int) -> Tensor | None:
    """``ancestors_T`` of `paged_attention`; None without a tree. tree: of each node the one before it; of a block in
    which all see each other, zeros. Sequences of as many tokens have it."""
    if not tree:
        return None
    nodes = [1]
    for node, parent in enumerate(tree[1:], 1):
        nodes.append(nodes[parent] | 1 << node)
    if not any(tree):  # a block
        nodes = [(1 << len(tree)) - 1] * len(tree)
    bits = [bit for n, _ in sequences for bit in (nodes if n == len(tree) else [-1] * n)]
    return make.tensor(bits + [-1] * pad, torch.int64)


def owned_rows(result: Tensor, args: Mapping[str, Any]) -> Tensor:
    """Rows that are not padding."""
    return result[: int(args["query_start_loc"][-1])]
