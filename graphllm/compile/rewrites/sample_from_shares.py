"""Linked pass: ranks that have the logits of a part of the vocabulary sample without putting the logits together, where
nothing else reads them."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from graphllm.compile.rewrites.contracts import Body
from graphllm.config import CompileConfig
from graphllm.ir.graph import Shapes
from graphllm.ir.op import op_of
from graphllm.ops.collectives.all_gather import all_gather
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample_shares import sample_shares
from graphllm.rewrite import Unit, is_implemented


def sample_from_shares(body: Body, results: Collection[Node], shapes: Shapes, config: CompileConfig) -> Body:
    """`sample_shares` in place of a `sample` that is the only reader of an `all_gather`, if every bucket has an
    implementation."""
    if config.tensor_parallel_size == 1:
        return body
    made: Body = []
    for name, node in body:
        given = sample.bind(node.args, node.kwargs) if op_of(node.target) is sample else {}
        gathered = given.pop("logits_SV", None)
        if not isinstance(gathered, Node) or op_of(gathered.target) is not all_gather:
            made.append((name, node))
            continue
        shares = all_gather.bind(gathered.args, gathered.kwargs)
        arguments = {"logits_SN": shares["x"], **given, "ranks": shares["ranks"], "width": shares["width"]}
        unit = Unit(name, node.graph, (), shapes)
        read = len(gathered.users) > 1 or gathered in results or node in results
        if read or not is_implemented(unit, config, sample_shares, **arguments):
            made.append((name, node))
            continue
        made = [(n, other) for n, other in made if other is not gathered]
        made.append((name, unit.replace(node, sample_shares, **arguments)))
        node.graph.erase_node(gathered)
    return made
