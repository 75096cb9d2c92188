"""Embeddings: rows of a table, with the factor that some models have, become `embedding`."""

from __future__ import annotations

from torch.fx import Node

from graphllm.compile.transformers_model.recognize.draft import Draft, args_of, aten, is_tensor, value
from graphllm.ops.embeddings.embedding import embedding
from graphllm.rewrite import only_user


def find_embeddings(draft: Draft) -> None:
    """Put `embedding` in the places of look-ups in a parameter."""
    for node in draft.calls(aten.embedding.default):
        table, ids = args_of(node)[:2]
        if draft.weight_of(table) is None or not is_tensor(ids) or value(ids).dim() != 1:
            draft.note(node.name, "a table that is computed, or ids with several dimensions")
            continue
        end, scale = _scaled(draft, node)
        given = {"token_ids_T": ids, "table_VD": table} | ({} if scale == 1.0 else {"scale": scale})
        draft.replace(end, draft.insert(end, embedding, **given))
    draft.drop_unread()


def _scaled(draft: Draft, node: Node) -> tuple[Node, float]:
    """What the rows become when they are multiplied at once, and the factor: a number, or a buffer with one value."""
    user = only_user(node)
    if user is None or user.target is not aten.mul.Tensor or value(user).dtype != value(node).dtype:
        return node, 1.0
    other = args_of(user)[1] if args_of(user)[0] is node else args_of(user)[0]
    while isinstance(other, Node) and other.op == "call_function" and other.target is aten.to.dtype:
        other = args_of(other)[0]
    if isinstance(other, (int, float)):
        return user, float(other)
    stored = draft.weight_of(other)
    if stored is not None and stored.value is not None and len(stored.value) == 1:
        return user, float(stored.value[0])
    return node, 1.0
