"""The process in which one system is prepared or measured: `python -m bench.cpu.worker '<JSON of a Task>'`.

Its last line on stdout is JSON: what it measured.
"""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Literal

from bench.cpu.cases import CASES, FIRST, FIRST_PROMPT, PEAK
from bench.cpu.peer import Runner, Workload, find_peers

_WARM = 4  # tokens generated before the clock runs


@dataclasses.dataclass(frozen=True)
class Task:
    """What to do with which system. begun: `time.perf_counter` when the process was started. seed: of the prompts."""

    do: Literal["prepare", "measure"]
    peer: str
    model: Workload
    begun: float
    seed: int

    def to_json(self) -> str:
        """For the command line."""
        plain = {**dataclasses.asdict(self), "model": self.model._asdict()}
        return json.dumps(plain, default=str)

    @staticmethod
    def from_json(text: str) -> Task:
        """What `to_json` gave."""
        plain = json.loads(text)
        model = plain["model"] | {name: Path(plain["model"][name]) for name in ("checkpoint", "work")}
        return Task(**{**plain, "model": Workload(**model)})


def measure(task: Task) -> dict[str, float]:
    """First token, then each case, once warm and once for the clock."""
    draw = random.Random(task.seed)
    vocab = task.model.config["vocab_size"]

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [[draw.randrange(vocab) for _ in range(tokens)] for _ in range(count)]

    runner: Runner = find_peers()[task.peer].load(task.model)
    try:
        first = runner.run(prompts(1, FIRST_PROMPT), 1)[0][0]
        found = {FIRST: first - (runner.begun or task.begun)}
        for case in CASES:
            runner.run(prompts(case.prompts, case.tokens), min(_WARM, case.generated))
            asked = prompts(case.prompts, case.tokens)
            begun = time.perf_counter()
            found[case.name] = case.rate(begun, runner.run(asked, case.generated))
    finally:
        runner.close()
    if runner.begun is None:
        found[PEAK] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return found


def main() -> None:
    """Do what the argument says."""
    task = Task.from_json(sys.argv[1])
    result: dict[str, float] = {}
    if task.do == "prepare":
        find_peers()[task.peer].prepare(task.model)
    else:
        result = measure(task)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
