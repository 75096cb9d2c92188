"""What a step that verifies trees which grow knows of their nodes: states that what drafts has written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphllm.config.token_tree import DynamicTree
from graphllm.program.specs import StateSpec

# By slot, of each node: the one before it; bits of those on the path to it; how many stand between it and the root.
STATES = ("tree_parents", "tree_bits", "tree_depths")


def states(tree: DynamicTree) -> tuple[StateSpec, ...]:
    """The states of each sequence's nodes."""
    dtypes = ("int32", "int64", "int32")
    return tuple(StateSpec(n, "slot", (tree.nodes,), d, "none") for n, d in zip(STATES, dtypes, strict=True))


def of_rows(v: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of each token of a step its depth [T] int32, and the bits of its ancestors [T] int64: 0 and -1 where it is no
    node of a tree, as the host tells by a negative number."""
    told_T, bits_NM, depths_NM = v["step.ancestors"], v["state.tree_bits"], v["state.tree_depths"]
    sequence_T, M = v["step.sequence_ids"].long(), bits_NM.shape[1]
    at_T = torch.arange(told_T.shape[0], device=told_T.device)
    place_T = (at_T - torch.index_select(v["step.query_start_loc"], 0, sequence_T)).clamp(0, M - 1)
    node_T = torch.index_select(v["step.slots"], 0, sequence_T).long() * M + place_T
    bits_T, depth_T = (torch.index_select(t.view(-1), 0, node_T) for t in (bits_NM, depths_NM))
    is_node_T = told_T >= 0
    return torch.where(is_node_T, depth_T, 0), torch.where(is_node_T, bits_T, -1)
