"""Inputs for accept_dynamic_tree: cases of accept_tree in which all sequences have the same tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from graphllm.ir.testing import Case, Maker
from graphllm.ops.speculation.accept_tree.cases import CASES as ALIKE


def _grown(case: Case) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        given: dict[str, Any] = dict(case.inputs(make))
        parents, bits, depths = given.pop("parents"), [1], [0]
        for node, parent in enumerate(parents[1:], 1):
            bits.append(bits[parent] | 1 << node)
            depths.append(depths[parent] + 1)
        S = given["slots_S"].shape[0]
        nodes = (("parents", parents, torch.int32), ("bits", bits, torch.int64), ("depths", depths, torch.int32))
        return given | {f"{n}_SM": make.tensor([v] * S, dtype) for n, v, dtype in nodes} | {"levels": max(depths)}

    return dataclasses.replace(case, inputs=inputs)


CASES = tuple(map(_grown, ALIKE))
