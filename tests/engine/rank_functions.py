"""Functions for `LLM.collective_rpc`, in a module that the processes of ranks can import."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch

from graphllm.runtime.rank_calls import Worker


def who(worker: Worker, *more: Any, **named: Any) -> list[Any]:
    return [worker.rank, worker.world_size, worker.device, os.getpid(), list(more), named]


def shapes(worker: Worker) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in worker.weights.items()}


def sum_over_ranks(worker: Worker, x: float) -> float:
    total = torch.tensor([x * (worker.rank + 1)])
    torch.distributed.all_reduce(total)
    return total.item()


def count(worker: Worker) -> int:
    worker.kept["count"] = worker.kept.get("count", 0) + 1
    counted: int = worker.kept["count"]
    return counted


def scale(worker: Worker, name: str, factor: float) -> None:
    worker.weights[name].mul_(factor)


def fail(worker: Worker, rank: int) -> None:
    if worker.rank == rank:
        raise ValueError("on purpose")


def sleep(worker: Worker, seconds: float) -> None:
    if worker.rank == 1:
        time.sleep(seconds)


def hang(worker: Worker, rank: int) -> None:
    """In a call that keeps the interpreter's lock."""
    if worker.rank == rank:
        ctypes.PyDLL(None).sleep(1000)


def whole_weight(worker: Worker) -> torch.Tensor:
    return next(iter(worker.weights.values()))
