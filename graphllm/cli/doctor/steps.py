"""The times of an artifact's steps, for `graphllm doctor`."""

from __future__ import annotations

import functools
import statistics

from graphllm.cli.doctor.timing import times_of
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from graphllm.weights.loading.random import random_weights
from graphllm.weights.plan.plan import WeightPlan


def full_steps(artifact: Artifact) -> dict[str, float]:
    """Median seconds of a full step of each bucket, with random weights."""
    plan = WeightPlan.from_json(artifact.weights)
    weights = random_weights(plan, artifact.device, libraries=artifact.libraries)
    executor = Executor(artifact, weights, 2)
    found = {}
    program = "plain" if executor.task == "generate" else executor.task
    for bucket in executor.buckets:
        executor.warm_up(bucket)
        if bucket.query_len > 1:
            continue
        sequences = min(bucket.hi, executor.max_num_seqs)
        step = ragged([[0] * (bucket.hi // sequences)] * sequences, [0] * sequences)
        found[f"{bucket.name} {program}"] = statistics.median(times_of(functools.partial(executor.run, step)))
    executor.close()
    return found
