"""Inputs for record_draft_probs: greedy and sampled rows, a vocabulary of its own, places after the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(S: int, K: int, V: int, own: int = 0, first: int = 0) -> Case:
    """own: tokens that the logits are of, 0 for all V. first: the place of the first sequence; others follow."""
    N = S + 3

    def inputs(make: Maker) -> dict[str, Any]:
        g = make.generator
        order = torch.randperm(N - 1, generator=g, device=g.device)[:S]
        ids = torch.randperm(V, generator=g, device=g.device)[:own]
        return {
            "logits_SV": make.normal(S, own or V, scale=3.0),
            "temperature_S": make.tensor([(0.0, 1.0, 0.4, 1.7)[s % 4] for s in range(S)], torch.float32),
            "places_S": make.tensor([first + s for s in range(S)], torch.int32),
            "slots_S": make.tensor(order.tolist(), torch.int32),
            "probs_NKV": make.normal(N, K, V, dtype=torch.float32), "ids_V": ids if own else None,
        }  # fmt: skip

    def specified(output: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
        return output[:-1]

    tolerance = {"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}
    name = f"S{S}_K{K}_V{V}_own{own}_from{first}"
    return Case(name, inputs, tolerance, "an exponential", Bucket("decode", S, S), specified=specified)


CASES = (
    _case(1, 1, 97),
    _case(4, 4, 301),
    _case(3, 4, 60, own=17),
    _case(4, 3, 33, first=1),
    _case(0, 3, 50),
)
