"""Run a piece kept as IR with the reference ops: the eager backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from graphllm.ir.graph import target_of
from graphllm.ir.registry import load_ops


@cache
def _registered() -> None:
    load_ops()


def interpret(ir: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a piece's canonical JSON (see `graphllm.ir.graph.to_json`) for the given inputs."""
    _registered()
    values: list[Any] = list(inputs)

    def real(item: Any) -> Any:
        if isinstance(item, dict):
            if "v" in item:
                return values[item["v"]]
            ((kind, name),) = item.items()
            return torch.device(name) if kind == "device" else getattr(torch, name)
        return [real(v) for v in item] if isinstance(item, list) else item

    for target, args, kwargs in ir["nodes"]:
        values.append(target_of(target)(*real(args), **{k: real(v) for k, v in kwargs.items()}))
    return [real(v) for v in ir["outputs"]]
