"""Functions for `LLM.collective_rpc`, and commands to the device that no file of the engine knows, in a module that the
processes of ranks can import."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
import torch

from graphllm.config import ConfigError
from graphllm.runtime.commands.calls import Worker
from graphllm.runtime.commands.command import Answered, Command, Device, Query, TensorData


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


class FillBlocks(Command):
    """Fill the first tensor of blocks: each with a byte of its own, and one tensor on top."""

    blocks: list[int]
    bytes: np.ndarray
    more: TensorData

    def check(self, device: Device) -> None:
        if 0 in self.blocks:
            raise ConfigError("block 0 is nobody's")

    def run(self, device: Device) -> None:
        name = next(n for n in device.states.tensors if n.endswith(".kv"))

        def work() -> None:
            for block, byte in zip(self.blocks, self.bytes.tolist(), strict=True):
                device.states.tensors[name][block].fill_(byte + self.more.tensor.item())

        device.in_order(work)


class SumOfBlock(Query):
    """The mean of a block in that tensor, on each rank."""

    block: int

    def run(self, device: Device) -> Answered:
        device.synchronize()
        name = next(n for n in device.states.tensors if n.endswith(".kv"))
        return Answered([device.worker.rank, device.states.tensors[name][self.block].float().mean().item()])


def break_sleep(worker: Worker, rank: int, method: str) -> None:
    """Have the sleep memory of one rank fail at the next call of a method, once."""
    if worker.rank != rank:
        return
    memory = worker.kept["sleep"]._memory
    real = getattr(memory, method)

    def broken(*given: Any) -> None:
        setattr(memory, method, real)
        raise ConfigError("memory: none is left")

    setattr(memory, method, broken)


def asleep(worker: Worker) -> list[Any]:
    """Tags of memory that is given back, and how many numbers of the weights are zero."""
    zeros = sum(weight.numel() - int(weight.count_nonzero()) for weight in worker.weights.values())
    return [sorted(worker.kept["sleep"].asleep), zeros]
