"""Positions of tokens, where a model looks them up in a table: those that its code counts, or that it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.tracing import layer_call
from graphllm.compile.transformers_model.unbatched import args_of

_LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor)
_TOKENS = 7


def are_looked_up(graph: Graph) -> bool:
    """Whether the forward pass around the layers uses positions for more than angles."""
    positions = graph.find_nodes(op="placeholder")[-1]
    return any(user.target not in (leaf_ops.rope_table, layer_call) for user in positions.users)


def first_position(given: Graph, counted: Graph, values: dict[str, Tensor]) -> int | None:
    """The number that the code counts positions from, where it is given none and no token is padding; None where it
    does something else. given, counted: the forward pass that is given the positions 0, 1 .., and the one that is not.
    values: numbers of buffers, by name."""
    pairs = list(zip(_indices(given, values), _indices(counted, values), strict=True))
    if any(a.shape[-1:] != b.shape[-1:] for a, b in pairs):
        return None
    offsets = {int(n) for a, b in pairs for n in (b.long() - a.long()).unique()} - {0}
    return None if len(offsets) > 1 else next(iter(offsets), 0)


def count_from(graph: Graph, first: int) -> None:
    """Have a graph count positions from another number than 0."""
    positions = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(positions):
        moved = graph.call_function(torch.ops.aten.add.Tensor, (positions, first))
    moved.meta["val"] = positions.meta["val"]
    positions.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)


def _indices(graph: Graph, values: dict[str, Tensor]) -> list[Tensor]:
    """What tables are read at, for some tokens."""
    ids = torch.arange(3, 3 + _TOKENS, dtype=torch.int32)[None]
    env: dict[Node, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        name = node.target.removeprefix("w.")
        if name in values and not values[name].dtype.is_floating_point:
            env[node] = values[name]
        elif node.target == "in.token_ids":
            env[node] = ids
        elif node.target == "in.positions":
            env[node] = torch.arange(_TOKENS, dtype=torch.int32)[None]
    found = []
    for node in graph.nodes:
        if node.target in _LOOKUPS:
            index = args_of(node)[1] if node.target is not torch.ops.aten.index_select.default else args_of(node)[2]
            found += [env[i] for i in (index if isinstance(index, list | tuple) else [index]) if i in env]
        if node.op == "call_function" and node.all_input_nodes and all(n in env for n in node.all_input_nodes):
            args, kwargs = torch.fx.map_arg((args_of(node), node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    return found
