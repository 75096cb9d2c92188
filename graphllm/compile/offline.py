"""Kernels compiled for a GPU without touching one: what processes do that compile candidates for tuning. Triton is told
the target, and finds what they leave in its cache where the same kernel is started."""

from __future__ import annotations

import functools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from graphllm.compile.jobs import Candidate, Done
from graphllm.compile.tune import Tunable, build_candidate
from graphllm.config import Target

_WARP = 32


class TargetOnly:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """Of the only device."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """One that nothing is started in."""
        return 0


def compile_for(target: Target, job: Candidate) -> Done:
    """Compile the kernels of a candidate for a target; the answer says why that is impossible, if it is."""
    _aim_at(target)
    return Done(problem=build_candidate(Tunable(job.op, job.tensors | job.plain, job.sizes, []), job.choice))


@functools.cache
def _aim_at(target: Target) -> None:
    capability = next(int(a.removeprefix("sm_")) for a in target.arch if a.startswith("sm_"))
    driver: Any = TargetOnly(GPUTarget("cuda", capability, _WARP))
    triton.runtime.driver.set_active(driver)
