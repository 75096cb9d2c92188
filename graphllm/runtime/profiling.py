"""Profiles of all ranks: what `LLM.start_profile` and `stop_profile` have each of them do. torch's profiler writes down
a GPU's kernels, operations of torch, and every step with its size: of compiled ones on a CPU that is all it sees.

A trace is a file for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from graphllm.config import ConfigError
from graphllm.runtime.commands.calls import Worker

PROFILE = "profile"  # in what a worker keeps, while there is one


def start_profile(worker: Worker, prefix: str) -> None:
    """Begin, in the thread that launches kernels. prefix: what the trace's path begins with. Raises ConfigError where
    nothing can be written there, and when there is a profile already."""
    import torch

    if PROFILE in worker.kept:
        raise ConfigError("start_profile: there is a profile already; stop_profile ends it")
    try:
        Path(f"{prefix}rank").parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(
            f"profile_prefix is {prefix!r:.200}: no folder can be made there ({failure.strerror}); give another one"
        ) from failure
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if worker.device.startswith("cuda") else [kinds.CPU]
    profile = torch.profiler.profile(activities=activities)
    worker.in_order(profile.start)
    worker.kept[PROFILE] = profile, prefix


def stop_profile(worker: Worker) -> str:
    """End the profile: the path of the trace. Raises ConfigError where there is none."""
    if PROFILE not in worker.kept:
        raise ConfigError("stop_profile: there is no profile; start_profile begins one")
    profile, prefix = worker.kept.pop(PROFILE)
    worker.in_order(profile.stop)
    path = f"{prefix}rank{worker.rank}-{os.getpid()}.trace.json.gz"
    profile.export_chrome_trace(path)
    return path


def drop_profile(worker: Worker) -> None:
    """End the profile, if there is one, without a trace."""
    if PROFILE in worker.kept:
        worker.in_order(worker.kept.pop(PROFILE)[0].stop)


def named(work: Callable[[], None], name: str) -> Callable[[], None]:
    """Work that has an entry in a profile."""
    import torch

    def run() -> None:
        with torch.profiler.record_function(name):
            work()

    return run
