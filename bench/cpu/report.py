"""Medians, floors and rows of what was measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.cpu.cases import CASES, FIRST, PEAK, Case
from bench.cpu.checkpoint import tensors_of
from bench.cpu.machine import IMPORT, PRODUCTS, READ
from bench.harness import Rows

COLUMNS = (*(case.name for case in CASES), FIRST, PEAK)
MACHINE = "machine"  # its own probe, among the systems that take turns
OURS = "graphllm"
WAYS = {"executor": ", executor", "LLM": "", "HTTP server": ", HTTP server"}
BITS = (16, 8, 4)
_SHARE = "batch 1: share of the memory speed around it"


class Parameters(NamedTuple):
    """How many there are, how many of them a prompt's token is multiplied with, and how many are in experts, a part of
    which each token chooses."""

    all: int
    layers: int
    experts: int = 0
    chosen: float = 1.0

    def read(self, sequences: int) -> float:
        """How many a step reads in which each of ``sequences`` has a token and chooses experts at random."""
        return self.all - self.experts * (1 - self.chosen) ** sequences


def count_parameters(config: dict[str, Any]) -> Parameters:
    """Of a checkpoint with tied embeddings, which are read as a whole by each step's last product."""
    sizes = {name: math.prod(shape) for name, shape in tensors_of(config)}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    chosen = config["num_experts_per_tok"] / config["num_experts"] if experts else 1.0
    layers = sum(size for name, size in sizes.items() if ".layers." in name) - round(experts * (1 - chosen))
    return Parameters(sum(sizes.values()), layers, experts, chosen)


@dataclasses.dataclass
class Turn:
    """Every loaded system ran every case once.

    index: within the round
    figures: by case, then by system in the order in which they ran: tokens a second, for MACHINE GB/s of memory
    around: by case and system, GB/s of memory right before and right after it, together
    """

    bits: int
    round: int
    index: int
    figures: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    around: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Measured:
    """Everything of one run. bits: by system. starts: what was measured once a round, by system or MACHINE. missing:
    why a system has no figures, or no more of them."""

    parameters: Parameters
    bits: dict[str, int] = dataclasses.field(default_factory=dict)
    starts: dict[str, list[dict[str, float]]] = dataclasses.field(default_factory=dict)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    def together(self, case: str, *names: str) -> list[tuple[float, ...]]:
        """The figures of the turns in which all of these ran the case."""
        found = (turn.figures.get(case, {}) for turn in self.turns)
        return [tuple(figures[n] for n in names) for figures in found if figures.keys() >= set(names)]

    def ratios(self, case: str, name: str, other: str) -> list[float]:
        """A system's figures over another's, turn by turn."""
        return [mine / its for mine, its in self.together(case, name, other)]

    def shares(self, name: str) -> list[float]:
        """How much of the speed at which memory was read just before and after it decoding one prompt used, by
        turn."""
        case, size = CASES[0].name, self.size(self.bits[name], 1)
        turns = (t for t in self.turns if name in t.around.get(case, {}))
        return [t.figures[case][name] * size / t.around[case][name] for t in turns]

    def medians(self) -> dict[str, dict[str, float]]:
        """By system and column, of those that have figures of all cases."""
        found = {}
        for name in self.bits:
            runs = {c.name: [figure for (figure,) in self.together(c.name, name)] for c in CASES}
            if all(runs.values()):
                found[name] = {c: statistics.median(figures) for c, figures in runs.items()} | self.start(name)
        return found

    def start(self, name: str) -> dict[str, float]:
        """Medians of what was measured once a round."""
        rounds = self.starts[name]
        columns = dict.fromkeys(column for figures in rounds for column in figures)
        return {column: statistics.median(r[column] for r in rounds if column in r) for column in columns}

    def reads(self) -> list[float]:
        """GB/s of every turn of the probe."""
        return [speed for case in CASES for (speed,) in self.together(case.name, MACHINE)]

    def floors(self) -> dict[int, dict[str, float]]:
        """The best that weights of 16, 8 and 4 bits allow here, by bits and column: decoding reads every weight once a
        step, a prompt's products run as from the first-level cache, a start imports torch."""
        machine, read = self.start(MACHINE), statistics.median(self.reads())
        found = {}
        for bits in BITS:
            prefill = machine[PRODUCTS] * 1e12 / (2 * self.parameters.layers)
            found[bits] = {
                c.name: prefill if c.generated == 1 else c.prompts * read / self.size(bits, c.prompts) for c in CASES
            }
            found[bits][FIRST] = machine[IMPORT]
        return found

    def size(self, bits: int, sequences: int) -> float:
        """GB of the weights that a step of ``sequences`` reads, without the scales of quantized ones."""
        return self.parameters.read(sequences) * bits / 8 / 1e9


def rows(measured: Measured) -> Rows:
    """All tables: what the machine can do, floors and medians, ratios within a turn, what gets from the kernels to the
    user, then the single turns."""
    found, floors, reads = measured.medians(), measured.floors(), measured.reads()
    spread = {"least read": min(reads), "most read": max(reads)}
    made: Rows = {MACHINE: _rounded({READ: statistics.median(reads), **measured.start(MACHINE), **spread})}
    for bits in BITS:
        names = [name for name in found if measured.bits[name] == bits]
        if names:
            made[f"{bits} bits, floor"] = _rounded(floors[bits])
        for name in names:
            share = statistics.median(measured.shares(name))
            made[f"{bits} bits, {name}"] = _rounded({**found[name], _SHARE: share})
        made |= compared(measured, names)
    made |= reach(measured)
    for name in (MACHINE, *measured.bits):
        turns = {c.name: [figure for (figure,) in measured.together(c.name, name)] for c in CASES}
        starts = {column: [r[column] for r in measured.starts.get(name, []) if column in r] for column in (FIRST, PEAK)}
        lists = {column: [round(v, 4) for v in values] for column, values in (turns | starts).items() if values}
        made[f"each turn, {name}"] = lists
    return made | ({"not available": dict(measured.missing)} if measured.missing else {})


def compared(measured: Measured, names: Sequence[str]) -> Rows:
    """graphllm over each other system of the same bits, turn by turn: medians, and the turns in which it was ahead.
    Systems of the same file, which their names end with, are compared with each other."""
    ours = [n for n in names if n.startswith(OURS)]
    made: Rows = {}
    for name in names if ours else ():
        if name in ours:
            continue
        own = next((n for n in ours if n == f"{OURS} {name.split()[-1]}"), ours[0])
        row = made.setdefault(f"{own} over {name}", {})
        for case in CASES:
            ratios = measured.ratios(case.name, own, name)
            ahead = f"ahead in {sum(r > 1 for r in ratios)} of {len(ratios)}"
            row[short(case)] = f"{statistics.median(ratios):.2f}, {ahead}"
    return made


def reach(measured: Measured) -> Rows:
    """How much of the kernels' speed gets through the engine and through the server: medians of the turns' shares."""
    found = measured.medians()
    made: Rows = {}
    for kind in ("bf16", "int8", "int4"):
        names = {way: f"{OURS} {kind}{suffix}" for way, suffix in WAYS.items()}
        if all(n in found for n in names.values()):
            for way in ("LLM", "HTTP server"):
                shares = {short(c): measured.ratios(c.name, names[way], names["executor"]) for c in CASES}
                medians = {c: statistics.median(ratios) for c, ratios in shares.items()}
                made[f"{kind}, {way}, share of the executor's speed"] = _rounded(medians)
    return made


def short(case: Case) -> str:
    """Its name without the unit."""
    return case.name.rpartition(",")[0]


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}
