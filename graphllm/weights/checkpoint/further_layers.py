"""Layers that only draft (MTP), where a checkpoint counts them on after the model's own: the tensors of each under the
names that such layers have elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from graphllm.weights.checkpoint.tensor_info import TensorInfo

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def further_layers(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Mapping[str, TensorInfo]:
    """The same tensors; those of layer num_hidden_layers + i, of num_nextn_predict_layers more, begin with
    "model.mtp_layers.<i>."."""
    own, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(own, int) or not isinstance(more, int):
        return tensors

    def named(name: str) -> str:
        found = _LAYER.fullmatch(name)
        further = found is not None and own <= int(found[1]) < own + more
        return f"model.mtp_layers.{int(found[1]) - own}.{found[2]}" if found is not None and further else name

    return {named(name): tensor for name, tensor in tensors.items()}
