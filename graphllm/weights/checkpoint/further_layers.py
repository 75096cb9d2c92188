"""Layers that only draft (MTP), where a checkpoint counts them on after the model's own: the tensors of each under the
names that such layers have elsewhere; and what of them is no copy of the model's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from graphllm.weights.checkpoint.checkpoint import FURTHER
from graphllm.weights.checkpoint.own_head import HEAD, same_bytes
from graphllm.weights.checkpoint.tensor_info import TensorInfo

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_TOKENS = "embed_tokens.weight"
_TABLES = {_TOKENS: f"mtp.{_TOKENS}", "shared_head.head.weight": f"mtp.{HEAD}"}


def further_layers(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Mapping[str, TensorInfo]:
    """The same tensors; those of layer num_hidden_layers + i, of num_nextn_predict_layers more, begin with
    "model.mtp_layers.<i>.". The embedding and the head of the first one are no part of it: they are called
    "mtp.embed_tokens.weight" and "mtp.lm_head.weight"."""
    own, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(own, int) or not isinstance(more, int):
        return tensors

    def named(name: str) -> str:
        found = _LAYER.fullmatch(name)
        if found is None or not own <= (number := int(found[1])) < own + more:
            return name
        if number == own and found[2] in _TABLES:
            return _TABLES[found[2]]
        return f"model.mtp_layers.{number - own}.{found[2]}"

    return {named(name): tensor for name, tensor in tensors.items()}


def drafting_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """What a checkpoint has for drafts only, without copies of the model's embedding and head, such as DeepSeek-V3's.
    A head that is not stored is the embedding."""
    tokens = tensors.get(f"model.{_TOKENS}")
    main = {f"mtp.{_TOKENS}": tokens, f"mtp.{HEAD}": tensors.get(HEAD, tokens)}

    def copied(name: str) -> bool:
        other = main.get(name)
        return other is not None and same_bytes(tensors[name], other)

    return {n: tensor for n, tensor in tensors.items() if FURTHER.match(n) and not copied(n)}
