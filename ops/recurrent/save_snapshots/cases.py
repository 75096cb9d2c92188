"""Inputs for save_snapshots: one pair and several, versions, kinds whose rows are no powers of two, padding."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.ir.testing import Case, Maker
from graphllm.ops.recurrent.snapshot_cases import MEMORIES, REAL, Memory

_TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-3, "float16": 5e-3}
_REASON = "float32 quotients; one between two codes may become either"


def _case(memory: Memory, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        versions = [(3 * slot + 1) % memory.versions for slot in range(memory.slots - 2)]
        version = make.tensor(versions, torch.int32) if memory.versions > 1 else None
        return {**memory.states(make), "version": version, **memory.places(make), **memory.kept(make)}

    return Case(memory.name, inputs, _TOLERANCE, _REASON, memory.bucket, size)


CASES = (*map(_case, MEMORIES), _case(REAL, "real"))
