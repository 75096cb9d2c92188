"""What the scheduler costs a step on the host: planning the next one and taking the result of the one before.

1, 64 and 256 running decodes, and 256 while requests come and go all the time. Prefix caching is on, pages are ample,
tokens are random: nothing stops but by length. `next` and `commit` are called in the engine core's order, the plan
before the tokens of the last one are known.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.driving import request
from bench.harness import Case
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import SchedulerLimits, SchedulerOutput
from graphllm.program.schema import CacheGroup, CacheLayout

CASES = [("scheduler", {"steps": 2000})]
HELP = {"steps": "steps of each row"}
PAGE, VOCAB, MAX_LEN, WARM = 16, 32000, 4096, 50


class Load:
    """Keeps ``running`` requests. Each has a random prompt of 100 to 500 tokens and, with ``turnover``, an output
    of 20 to 200, otherwise one that outlasts the measurement."""

    def __init__(self, running: int, turnover: bool) -> None:
        limits = SchedulerLimits(
            max_num_seqs=running, max_num_batched_tokens=8192, max_num_rows=running, max_len=MAX_LEN, block_size=PAGE
        )
        layout = CacheLayout((CacheGroup("full", 0, PAGE),), 1 + running * MAX_LEN // PAGE)
        self.scheduler = Scheduler(limits, layout)
        self.running, self.turnover, self.added = running, turnover, 0
        self.rng = np.random.default_rng(0)
        self.plan: SchedulerOutput | None = None

    def step(self) -> tuple[float, float, int]:
        """Microseconds of next() and of commit(), and how many requests were admitted."""
        while self.scheduler.unfinished < self.running:
            prompt = self.rng.integers(0, VOCAB, int(self.rng.integers(100, 500))).tolist()
            limit = int(self.rng.integers(20, 200)) if self.turnover else MAX_LEN - len(prompt)
            self.scheduler.add(request(self.added, prompt, limit, temperature=0))
            self.added += 1
        start = time.perf_counter()
        plan = self.scheduler.next()
        planned = time.perf_counter() - start
        taken = 0.0
        if self.plan is not None:
            tokens = self.rng.integers(0, VOCAB, int(self.plan.rows.sum())).astype(np.int32)
            start = time.perf_counter()
            self.scheduler.commit(self.plan, tokens)
            taken = time.perf_counter() - start
        self.plan = plan
        assert plan is not None
        return 1e6 * planned, 1e6 * taken, len(plan.admitted)


def measure(running: int, turnover: bool, steps: int) -> dict[str, Any]:
    """Medians and 99th percentiles over ``steps`` steps."""
    load = Load(running, turnover)
    while load.scheduler.running < running:
        load.step()
    for _ in range(WARM):
        load.step()
    before = load.added
    rows = np.array([load.step() for _ in range(steps)])
    assert load.scheduler.preemptions == 0
    times = {"next": rows[:, 0], "commit": rows[:, 1], "both": rows[:, 0] + rows[:, 1]}
    found: dict[str, Any] = {
        name: {"median us": round(float(np.median(t)), 1), "p99 us": round(float(np.percentile(t, 99)), 1)}
        for name, t in times.items()
    }
    found["admitted per step"] = round((load.added - before) / steps, 2)
    return found


def run(case: Case) -> dict[str, Any]:
    """Without turnover by the number of running requests, then with it."""
    return {
        "running decodes": {n: measure(n, False, case.steps) for n in (1, 64, 256)},
        "256 running, requests come and go": measure(256, True, case.steps),
    }
