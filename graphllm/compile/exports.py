"""Whether steps can leave recurrent states at borders inside of chunks: where all kernels that write them do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphllm.compile.codegen.jobs import Built
from graphllm.compile.layout import Layout
from graphllm.compile.link import Linked, Piece
from graphllm.compile.tasks.snapshots import EXPORTS, is_exporting
from graphllm.config import Bucket
from graphllm.ir.op import Op, op_of


def all_export(linked: Linked, layout: Layout, built: Mapping[tuple[str, Bucket], Built]) -> bool:
    """Whether steps of chunks leave every recurrent state of the model where ``exports`` says."""
    recurrent, *of_drafts = (
        {n for n in _names(graph) if layout.states[n].retention == "last"} for graph in layout.layers
    )
    if not recurrent or any(of_drafts):  # runs of draft graphs are told of no borders
        return False
    chosen: dict[str, list[tuple[str, ...]]] = {}
    for (id, bucket), made in built.items():
        if bucket.kind == "mixed":
            chosen.setdefault(id, []).append(made.chosen)
    exported = {
        name
        for program in linked.programs[0].values()
        for call in program.calls
        for name in map(call.inputs.__getitem__, _exported(linked.pieces[call.piece], chosen.get(call.piece, [])))
    }
    return recurrent <= exported


def _names(layers: list[dict[str, str]]) -> list[str]:
    return [name for layer in layers for name in layer.values()]


def _exported(piece: Piece, chosen: Sequence[tuple[str, ...]]) -> list[int]:
    """The inputs of a piece that its ops export states of, whatever was chosen for them. chosen: see `Built`."""
    inputs = {node: i for i, node in enumerate(piece.graph.find_nodes(op="placeholder"))}
    found = []
    for node in piece.graph.nodes:
        op = op_of(node.target)
        if op is None or EXPORTS not in op.signature.parameters:
            continue
        given = op.bind(node.args, node.kwargs)
        if given[EXPORTS] is not None and all(_chosen_exports(op, names) for names in chosen):
            found += [inputs[given[name]] for name in op.mutates if given[name] in inputs]
    return found


def _chosen_exports(op: Op, chosen: tuple[str, ...]) -> bool:
    """Whether what was chosen for the op in a piece exports."""
    if chosen == ("all: reference",):
        return True
    names = [text.removeprefix(f"{op.name}: ").partition(" ")[0] for text in chosen if text.startswith(f"{op.name}: ")]
    return bool(names) and all(name == "reference" or is_exporting(op.impls[name].fn) for name in names)
