"""Inputs for load_snapshots: one pair and several, versions, kinds whose rows are no powers of two, padding."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.ir.testing import Case, Maker
from graphllm.ops.recurrent.snapshot_cases import MEMORIES, REAL, Memory, own_entries

_TOLERANCE = {"float32": 1e-7, "bfloat16": 4e-3, "float16": 5e-4}
_REASON = "one rounding of each product to the state's dtype (Triton's interpreter cuts where a GPU rounds)"


def _case(memory: Memory, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {**memory.kept(make), **memory.places(make), **memory.states(make)}

    return Case(memory.name, inputs, _TOLERANCE, _REASON, memory.bucket, size, written=own_entries)


CASES = (*map(_case, MEMORIES), _case(REAL, "real"))
