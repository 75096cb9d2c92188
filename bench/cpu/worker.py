"""The process in which one system is prepared or measured: `python -m bench.cpu.worker '<JSON of a Task>'`.

A system that is measured stays loaded and runs a case at every command, until there are no more.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Literal

from bench.cpu.cases import CASES, FIRST, FIRST_PROMPT, PEAK, Case
from bench.cpu.peer import Runner, Workload, find_peers
from bench.process import Commands

_WARM = 4  # tokens generated before the clock runs


@dataclasses.dataclass(frozen=True)
class Task:
    """What to do with which system. begun: `time.perf_counter` when the process was started. seed: of the prompts
    before the first command."""

    do: Literal["prepare", "measure"]
    peer: str
    model: Workload
    begun: float
    seed: str

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


def make_prompts(case: Case, vocab: int, seed: str) -> list[list[int]]:
    """Of random tokens. Prompts of two cases or seeds have no common beginning, so no cache of prompts helps."""
    draw = random.Random(f"{seed} {case.name}")
    return [[draw.randrange(vocab) for _ in range(case.tokens)] for _ in range(case.prompts)]


def measure(runner: Runner, task: Task, commands: Commands) -> None:
    """Run the first prompt of all, answer; then as the commands say, each case once before to warm up."""
    vocab = task.model.config["vocab_size"]
    try:
        first = runner.run(make_prompts(Case(FIRST, 1, FIRST_PROMPT, 1), vocab, task.seed), 1)[0][0]
        commands.answer({FIRST: first - (runner.begun or task.begun)})
        cold = {case.name for case in CASES}
        for command in commands:
            case = next(c for c in CASES if c.name == command["case"])
            if case.name in cold:
                cold.remove(case.name)
                runner.run(make_prompts(case, vocab, task.seed), min(_WARM, case.generated))
            asked = make_prompts(case, vocab, command["seed"])
            begun = time.perf_counter()
            commands.answer(case.rate(begun, runner.run(asked, case.generated)))
    finally:
        runner.close()
    commands.answer({PEAK: _peak() / 1e9} if runner.begun is None else {})


def _peak() -> int:
    """The most bytes that this process has had resident; getrusage also counts what its parent had when it forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Do what the argument says."""
    task, commands = Task.from_json(sys.argv[1]), Commands()
    peer = find_peers()[task.peer]
    if task.do == "prepare":
        peer.prepare(task.model)
        commands.answer({})
    else:
        measure(peer.load(task.model), task, commands)


if __name__ == "__main__":
    main()
