"""Work for tuning that needs no GPU: find sites, and compile candidates. Triton gets the target, and finds the kernels
in its cache when they are launched."""

from __future__ import annotations

import contextlib
import functools
import os
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.nvidia import driver as nvidia

from graphllm.compile.codegen.cubins import TargetOnly
from graphllm.compile.codegen.jobs import Candidate, Done, Find
from graphllm.compile.tuning.tune import build_candidate, tunables
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import Shapes


def prepare() -> None:
    """Do once, before processes are forked, what each of them would: fake tensors import a lot, and Triton has a C
    compiler make the module that loads kernels. CUDA is not begun."""
    Shapes("cpu")
    with contextlib.suppress(Exception):  # the first launch of a kernel reports it
        nvidia.CudaUtils()


def work(config: CompileConfig, job: Find | Candidate) -> Done:
    """Do a job; where a candidate cannot be compiled, the answer says why."""
    _prepare_process(config.target)
    if isinstance(job, Find):
        return Done(sites=tunables([(job.piece, job.bucket)], config))
    return Done(problem=build_candidate(job.site, job.choice))


@functools.cache
def _prepare_process(target: Target) -> None:
    triton.runtime.driver.set_active(TargetOnly(target))
    if hasattr(nvidia, "make_launcher"):
        triton.knobs.compilation.listener = _make_launcher
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else fake tensors of a GPU begin CUDA in each process


def _make_launcher(*, src: Any, metadata: dict[str, Any], **_: Any) -> None:
    """Compile the C function that starts a kernel, which Triton 3.6 makes for each signature and keeps: half a second
    that whoever times kernels would wait for."""
    with contextlib.suppress(Exception):  # likewise
        nvidia.CudaLauncher(src, SimpleNamespace(**metadata))
