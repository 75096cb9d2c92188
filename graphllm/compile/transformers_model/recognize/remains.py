"""Remains: what a recognized graph still has of ordinary ops that read and write much, for people."""

from __future__ import annotations

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.recognize.draft import Draft, args_of, aten, own_op, value

# What they would have been, or why they stay.
_KNOWN = {
    aten.rsqrt.default: "a norm of another form",
    aten.layer_norm.default: "a norm over several dimensions",
    aten.linear.default: "a product that no op reads quantized or with adapters",
    aten.matmul.default: "a product that no op reads quantized or with adapters",
    aten.bmm.default: "a product that no op reads quantized or with adapters",
    aten.addmm.default: "a product that no op reads quantized or with adapters",
    aten.einsum.default: "a product that no op reads quantized or with adapters",
    aten.embedding.default: "a table that no op reads",
    aten.transpose.int: "a transpose that nothing undoes",
    aten.topk.default: "routing, or another choice",
    aten.sort.default: "routing, or another choice",
    aten.cumsum.default: "a sum over tokens",
    aten.softmax.int: "attention or routing of another form",
    aten.convolution.default: "a convolution",
    aten.conv1d.default: "a convolution",
}


def name_remains(draft: Draft) -> None:
    """Note each ordinary op of these kinds that is left."""
    for node in draft.graph.nodes:
        if node.op == "call_function" and node.target in _KNOWN and own_op(node) is None:
            draft.note(node.name, _KNOWN[node.target])
        elif node.target is leaf_ops.attention and value(args_of(node)[0]).dim() != 3:
            draft.note(node.name, "attention whose heads have further dimensions")
