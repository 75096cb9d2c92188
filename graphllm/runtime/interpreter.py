"""Run a piece kept as IR with the reference ops: the eager backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from graphllm.ir.graph import target_of
from graphllm.ir.graph_form import argument_of
from graphllm.ir.registry import load_ops


@cache
def _registered() -> None:
    load_ops()


def interpret(ir: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a piece's canonical JSON (see `graphllm.ir.graph.to_json`) for the given inputs."""
    _registered()
    values: list[Any] = list(inputs)
    for target, args, kwargs in ir["nodes"]:
        given = {k: argument_of(v, values) for k, v in kwargs.items()}
        values.append(target_of(target)(*argument_of(args, values), **given))
    return [argument_of(v, values) for v in ir["outputs"]]
