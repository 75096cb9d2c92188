"""What a system under measurement is: a file in bench/cpu/peers. Its `PEERS` say how to make, load and run it."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Times = list[list[float]]


class Workload(NamedTuple):
    """The model that every system runs.

    checkpoint: folder as `make_checkpoint` writes it. work: folder for what systems convert it to. config: its
    config.json. threads: of the kernels. max_len: tokens of prompt and output together; batch: sequences at once.
    """

    checkpoint: Path
    work: Path
    config: dict[str, Any]
    threads: int
    max_len: int
    batch: int


class Runner(ABC):
    """A loaded system, in a process of its own. begun: `time.perf_counter` at the start of the process, when the
    system itself starts another one; None for the process that it lives in."""

    begun: float | None = None

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        """Generate ``count`` tokens for each prompt, all prompts at once, greedily and whatever the tokens are.

        The clock readings (`time.perf_counter`) at which each prompt's tokens came, first to last.
        """

    def close(self) -> None:
        """End what was started."""
        return


class Peer(ABC):
    """A system in one setting. name: in tables. bits: of a weight. packages: distributions with versions that matter.
    modules: what must be importable."""

    name: str
    bits: int
    packages: tuple[str, ...]
    modules: tuple[str, ...]

    def missing(self) -> str | None:
        """Why it cannot run here, None when it can."""
        absent = [m for m in self.modules if importlib.util.find_spec(m) is None]
        return f"{', '.join(absent)} not installed" if absent else None

    @abstractmethod
    def prepare(self, model: Workload) -> None:
        """Convert the checkpoint under ``model.work``, unless that was done before."""

    @abstractmethod
    def files(self, model: Workload) -> Sequence[Path]:
        """The files and folders that it loads, for them to be in the page cache when it starts."""

    @abstractmethod
    def load(self, model: Workload) -> Runner:
        """Load it, ready to run."""


class Steps:
    """Collects clock readings of steps that give one token to every prompt."""

    def __init__(self, prompts: int) -> None:
        self.times: Times = [[] for _ in range(prompts)]

    def tick(self) -> None:
        """Every prompt has its next token now."""
        now = time.perf_counter()
        for times in self.times:
            times.append(now)


def find_peers() -> dict[str, Peer]:
    """All peers by name, from every file in bench/cpu/peers, graphllm's first."""
    package = importlib.import_module("bench.cpu.peers")
    names = sorted((m.name for m in pkgutil.iter_modules(package.__path__)), key=lambda n: (n != "ours", n))
    found = [peer for name in names for peer in importlib.import_module(f"bench.cpu.peers.{name}").PEERS]
    return {peer.name: peer for peer in found}
