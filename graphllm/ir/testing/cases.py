"""Case: one named input of an op, with its tolerance. Cases drive the shared test suite and `graphllm op bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphllm.config import Bucket


def _all(output: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    return output


def _whole(name: str, state: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    return state


@dataclass(frozen=True)
class Case:
    """Inputs for one call.

    inputs(make): the op's arguments by name; ``make`` draws the tensors. tolerance: largest accepted relative error
    ||out - ref|| / ||ref|| against the reference in float64, by dtype; `reason` says where that error comes from. exact
    ops (integer outputs) use 0. size "small" runs everywhere, also under Triton's interpreter; "real" only natively,
    and is what `op bench` times. bucket: the token counts the call stands for, so that implementations can be chosen.
    specified(output, args): the part of an output that the op specifies, for ops that leave padding rows open.
    written(name, state, args): the same of an argument that is written in place, such as all slots but the scrap one.
    """

    name: str
    inputs: Callable[[Maker], dict[str, Any]]
    tolerance: Mapping[str, float]
    reason: str
    bucket: Bucket
    size: Literal["small", "real"] = "small"
    specified: Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor] = _all
    written: Callable[[str, torch.Tensor, Mapping[str, Any]], torch.Tensor] = _whole


def moved_rows(reason: str, **arguments: Any) -> tuple[Case, ...]:
    """Cases of an op that gives rows x [T, D] as they are in a group of one. arguments: the others of the op."""

    def case(T: int, D: int, size: Literal["small", "real"] = "small") -> Case:
        def inputs(make: Maker) -> dict[str, Any]:
            return {"x": make.normal(T, D), **arguments}

        exact = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
        return Case(f"T{T}_D{D}", inputs, exact, reason, Bucket("mixed" if T > 64 else "decode", T, T), size)

    return case(1, 48), case(66, 24), case(0, 32), case(64, 4096, size="real")


@dataclass
class Maker:
    """Draws the tensors of a case: fresh random values of the case's dtype on the device under test."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal values times ``scale``."""
        drawn = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return (drawn * scale).to(dtype or self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Uniform integers in [low, high)."""
        drawn = torch.randint(low, high, shape, generator=self.generator, device=self.generator.device)
        return drawn.to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """The given values."""
        return torch.tensor(values, dtype=dtype, device=self.device)
