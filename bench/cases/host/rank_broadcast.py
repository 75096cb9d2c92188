"""What it costs to tell other ranks of a step: through shared memory, in a process that sleeps or looks for it.

For decode steps of 1, 64 and 256 sequences of 2,000 tokens (the arrays of a step as the engine stages them, with its
block tables): microseconds of rank 0's host (to encode the step and write it), and until another rank has it as arrays
again, medians and 99th percentiles. Needs no GPU.
"""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import msgspec
import numpy as np

from bench.harness import Case, worker_command, worker_environment
from graphllm.runtime.memory.staging import ragged
from graphllm.runtime.ranks.broadcast import Reader, Writer
from graphllm.runtime.ranks.rank_messages import Message, Start

CASES = [("rank_broadcast", {"ranks": 2})]
STEPS, CONTEXT, BLOCK = 1000, 2000, 16


def step(size: int) -> Any:
    tables = np.arange(size * (CONTEXT // BLOCK + 1), dtype=np.int32).reshape(size, -1)
    made = ragged([[1]] * size, [CONTEXT] * size, [tables])
    rows = {name: np.zeros(size, np.int32) for name in ("row_slots", "sample_index", "top_k", "pending")}
    rows |= {name: np.ones(size, np.float32) for name in ("temperature", "top_p", "min_p")}
    return made._replace(arrays={**made.arrays, **rows, "seed": np.arange(size, dtype=np.int64)})


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def read(fd: int, readers: int, number: int, spin: float) -> list[int]:
    """Another rank: take the steps; when each had come."""
    reader = Reader(fd, readers, number, spin)
    decode = msgspec.msgpack.Decoder(Message).decode
    came = []
    for _ in range(STEPS):
        command = decode(reader.read())
        assert isinstance(command, Start)
        command.step()
        came.append(now())
    return came


def measure(size: int, ranks: int, spin: float) -> dict[str, float]:
    writer, encode, made = Writer(ranks - 1), msgspec.msgpack.Encoder().encode, step(size)
    others = [
        subprocess.Popen(
            worker_command("call", read, writer.fd, ranks - 1, n, spin), pass_fds=[writer.fd],
            stdout=subprocess.PIPE, env=worker_environment(),
        )
        for n in range(ranks - 1)
    ]  # fmt: skip
    time.sleep(3)
    begun, ended = [], []
    for _ in range(STEPS):
        begun.append(now())
        message = encode(Start.of(made, "plain", False))
        writer.write(message, lambda: None)
        ended.append(now())
        time.sleep(0.002)
    came = np.array([json.loads(p.communicate()[0]) for p in others]).max(axis=0)
    cost = (np.array(ended) - begun)[20:] / 1e3
    latency = (came - np.array(begun))[20:] / 1e3
    names = ("host us", "host us p99", "arrived us", "arrived us p99")
    values = (np.median(cost), np.percentile(cost, 99), np.median(latency), np.percentile(latency, 99))
    return {"bytes": len(message)} | {n: round(float(v), 1) for n, v in zip(names, values, strict=True)}


def run(case: Case) -> dict[str, Any]:
    """A row for each size, with readers that sleep and with readers that look."""
    return {
        f"{size} sequences, {how}": measure(size, case.ranks, spin)
        for how, spin in (("asleep", 0.0), ("looking", 0.01))
        for size in (1, 64, 256)
    }
