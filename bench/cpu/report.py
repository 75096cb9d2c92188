"""Medians, floors, tables and the plot of what was measured."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.cpu.cases import CASES, FIRST, PEAK
from bench.cpu.checkpoint import tensors_of
from bench.cpu.machine import IMPORT, PRODUCTS, READ

COLUMNS = (*(case.name for case in CASES), FIRST, PEAK)
MACHINE = "machine"  # its own probe, among the systems that take turns
OURS = "graphllm"
WAYS = {"executor": ", executor", "LLM": "", "HTTP server": ", HTTP server"}
BITS = (16, 8, 4)
_SHARE = "batch 1: share of the memory speed beside it"
_FAR = 2.0  # a floor that is so many times the best system's figure would squeeze the bars


class Parameters(NamedTuple):
    """How many there are, how many of them a prompt's token is multiplied with, and how many are in experts, a part of
    which each token chooses."""

    all: int
    layers: int
    experts: int = 0
    chosen: float = 1.0

    def read(self, sequences: int) -> float:
        """How many a step reads in which each of so many sequences has a token and chooses experts at random."""
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
    """Every loaded system ran every case once. index: within the round. figures: by case, then by system in the order
    in which they ran: tokens a second, for MACHINE the speed of memory in GB/s. beside: what that was right before and
    right after each system, together."""

    bits: int
    round: int
    index: int
    figures: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    beside: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Measured:
    """Everything of one run. bits: by system. starts: what was measured once a round, by system or MACHINE. missing:
    why a system has no figures, or no more of them."""

    about: dict[str, Any]
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
        turns = (t for t in self.turns if name in t.beside.get(case, {}))
        return [t.figures[case][name] * size / t.beside[case][name] for t in turns]

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
        """The best that weights of so many bits allow here, by bits and column: decoding reads every weight once a
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
        """GB of the weights that a step of so many sequences reads, without the scales of quantized ones."""
        return self.parameters.read(sequences) * bits / 8 / 1e9


def write(folder: Path, name: str, measured: Measured) -> None:
    """``name``.json, .md and .svg in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(to_plain(measured), indent=1))
    (folder / f"{name}.md").write_text(to_markdown(measured, name))
    plot(measured, folder / f"{name}.svg")


def to_plain(measured: Measured) -> dict[str, Any]:
    """For the JSON file: medians first, then all rounds and turns."""
    found = measured.medians()
    rounds = {name: [_rounded(r) for r in starts] for name, starts in measured.starts.items()}
    systems = {
        name: {"bits": bits, "median": _rounded(found.get(name, {})), "rounds": rounds.get(name, [])}
        for name, bits in measured.bits.items()
    }
    machine = {READ: statistics.median(measured.reads()), **measured.start(MACHINE)}
    turns = [
        vars(t) | {part: {c: _rounded(f) for c, f in getattr(t, part).items()} for part in ("figures", "beside")}
        for t in measured.turns
    ]
    return {
        **measured.about, "parameters": measured.parameters._asdict(),
        "machine can": {"median": _rounded(machine), "rounds": rounds[MACHINE]},
        "floors": {f"{bits} bits": _rounded(floor) for bits, floor in measured.floors().items()},
        "systems": systems, "turns": turns, "not available": measured.missing,
    }  # fmt: skip


def to_markdown(measured: Measured, name: str) -> str:
    """The tables."""
    found, floors, about, reads = measured.medians(), measured.floors(), measured.about, measured.reads()
    lines = [
        f"# {about['shape']}, random weights: graphllm beside other systems on a CPU", "",
        f"{about['machine']}, {about['threads']} threads, {about['date']}: `{about['command']}`. Systems of the same "
        "bits are loaded side by side and take turns. Medians: of the rounds for start and memory, else of all turns "
        f"({about['turns']} a round, {_rounds(measured)}). 128 tokens in, 64 out. Memory is read at "
        f"{statistics.median(reads):.1f} GB/s ({min(reads):.1f} to {max(reads):.1f} in the turns), "
        f"bf16 products of the first-level cache run at {measured.start(MACHINE)[PRODUCTS]:.2f} TFLOP/s. "
        f"Everything is in `{name}.json`.", "",
        f"![plot]({name}.svg)", "",
    ]  # fmt: skip
    for bits in BITS:
        rows = {n: m for n, m in found.items() if measured.bits[n] == bits and ", " not in n}
        if rows:
            lines += [f"## {bits}-bit weights", "", *table({"floor": floors[bits], **rows}, COLUMNS), ""]
            lines += beside(measured, bits, list(rows))
    lines += reach(measured)
    if measured.missing:
        lines += ["## Not available", "", *(f"- {n}: {reason}" for n, reason in measured.missing.items()), ""]
    versions = ", ".join(f"{package} {v}" for package, v in about["versions"].items())
    lines += [
        "## How it was measured", "",
        f"Versions: {versions}; {about['system']}.", "",
        "In a round, the systems of 16 bits are started and ended one after the other, in random order, in fresh "
        "processes, with their files in the page cache: that is their start. Then all are loaded and take turns: for "
        "each case, every system runs it once while the others wait, with the same prompts, in an order that is drawn "
        "each time, the first time after a short run to warm up; "
        "before and after each, memory is read plainly, 12 times 1.2 GB, in all as a decode counts all its time. Then "
        "they end, and those of 8 and of 4 bits follow. A shared machine's memory changes its speed within seconds, so "
        "what compares is figures of one turn, as the second table of each kind does. Systems of different bits share "
        "no turns.", "",
        "The floor reads the weights once a step, of experts as many as are chosen at random, without the scales of "
        "quantized ones; a prompt's products at the speed of a loop of them from the first-level cache, without "
        "attention and the first and last layer; a start that only imports torch. Decode counts from when every prompt "
        "has its first token. Start is from the process's start to the first token of a prompt of 16. OpenVINO's and "
        "llama.cpp's files are made from the same "
        "numbers; each system's own defaults otherwise.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def beside(measured: Measured, bits: int, names: Sequence[str]) -> list[str]:
    """graphllm over each other system, turn by turn, and how much of the read speed around it decoding used. Systems of
    the same file, which their names end with, are compared with each other."""
    ours = [n for n in names if n.startswith(OURS)]
    if not ours:
        return []
    rows: dict[str, dict[str, float | str]] = {}
    for name in names:
        own = next((n for n in ours if n == f"{OURS} {name.split()[-1]}"), ours[0])
        rows[name] = {_SHARE: statistics.median(measured.shares(name))}
        for case in CASES if name not in ours else ():
            ratios = measured.ratios(case.name, own, name)
            ahead = f"ahead in {sum(r > 1 for r in ratios)} of {len(ratios)}"
            rows[name][case.name] = f"{_number(statistics.median(ratios))}, {ahead}"
    title = (
        f"{' or '.join(ours)} over each other system, turn by turn: the median, and the turns in which it was ahead."
    )
    return [title, "", *table(rows, [*(c.name for c in CASES), _SHARE]), ""]


def reach(measured: Measured) -> list[str]:
    """How much of the kernels' speed gets through the engine and through the server."""
    found = measured.medians()
    lines: list[str] = []
    for kind in ("bf16", "int8", "int4"):
        names = {way: f"{OURS} {kind}{suffix}" for way, suffix in WAYS.items()}
        if not all(n in found for n in names.values()):
            continue
        rows: dict[str, dict[str, float]] = {}
        for way, n in names.items():
            rows[f"{kind}, {way}"] = found[n]
            if way != "executor":
                shares = {c.name: measured.ratios(c.name, n, names["executor"]) for c in CASES}
                rows[f"{kind}, {way}: share"] = {c: statistics.median(ratios) for c, ratios in shares.items()}
        lines += [*table(rows, [*(c.name for c in CASES), FIRST]), ""]
    return ["## From the kernels to the user", "", "Shares are medians of the turns' own.", "", *lines] if lines else []


def table(rows: Mapping[str, Mapping[str, float | str]], columns: Iterable[str]) -> list[str]:
    """Markdown; an empty cell where there is no figure."""
    columns = list(columns)
    lines = ["| | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name, figures in rows.items():
        cells = (_number(figures[c]) if c in figures else "" for c in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def plot(measured: Measured, file: Path) -> None:
    """A panel of bars for each column, the systems in the order of their figures, the floors as lines."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "graphllm", "svg.fonttype": "none"})  # reproducible, and small
    from matplotlib import pyplot

    found, floors = measured.medians(), measured.floors()
    names = [n for n in found if ", " not in n]
    columns = [*(c.name for c in CASES), FIRST]
    figure, panels = pyplot.subplots(1, len(columns), figsize=(4.6 * len(columns), 0.6 + 0.34 * max(len(names), 4)))
    shades = {16: "#4472a8", 8: "#5b9c64", 4: "#b8863b"}
    for panel, column in zip(panels, columns, strict=True):
        order = sorted(names, key=lambda n: found[n][column], reverse=column == FIRST)
        colors = [shades[measured.bits[n]] for n in order]
        bars = panel.barh(order, [found[n][column] for n in order], color=colors)
        panel.bar_label(bars, [_number(found[n][column]) for n in order], padding=3, fontsize=8)
        most = _FAR * max(found[n][column] for n in names)
        for floor, bits in {floors[b][column]: b for b in reversed(BITS)}.items():  # equal ones in the first's color
            if floor <= most:
                panel.axvline(floor, color=shades[bits], linestyle=":", linewidth=1)
        for label in panel.get_yticklabels():
            label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")
        panel.set_title(column, fontsize=10)
        panel.tick_params(labelsize=8)
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    title = "Blue 16, green 8, brown 4 bits a weight; dotted: what the machine's memory and products allow"
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def _rounds(measured: Measured) -> str:
    count = len({turn.round for turn in measured.turns})
    return "1 round" if count == 1 else f"{count} rounds"
