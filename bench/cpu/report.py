"""Medians, floors, tables and the plot of what was measured."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.cpu.cases import CASES, FIRST, PEAK
from bench.cpu.checkpoint import qwen2_tensors
from bench.cpu.machine import GEMM, IMPORT, READ
from bench.cpu.peer import Peer

COLUMNS = (*(case.name for case in CASES), FIRST, PEAK)
OURS = "graphllm"
WAYS = {"executor": ", executor", "LLM": "", "HTTP server": ", HTTP server"}
_BITS = (16, 8, 4)
_FAR = 2.0  # a floor that is so many times the best system's figure would squeeze the bars


class Parameters(NamedTuple):
    """How many there are, and how many of them a prompt's token is multiplied with."""

    all: int
    layers: int


def count_parameters(config: dict[str, Any]) -> Parameters:
    """Of a checkpoint with tied embeddings, which are read as a whole by each step's last product."""
    sizes = {name: math.prod(shape) for name, shape in qwen2_tensors(config)}
    return Parameters(sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers." in name))


@dataclasses.dataclass
class Measured:
    """Everything of one run. machine, and figures by system: one mapping for each round. bits: by system. missing: why
    a system has no figures, or no more of them."""

    about: dict[str, Any]
    parameters: Parameters
    machine: list[dict[str, float]] = dataclasses.field(default_factory=list)
    figures: dict[str, list[dict[str, float]]] = dataclasses.field(default_factory=dict)
    bits: dict[str, int] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, peer: Peer, figures: dict[str, float]) -> None:
        """One round of one system."""
        self.bits[peer.name] = peer.bits
        self.figures.setdefault(peer.name, []).append(figures)

    def medians(self) -> dict[str, dict[str, float]]:
        """By system and column."""
        return {name: medians(rounds) for name, rounds in self.figures.items()}

    def floors(self) -> dict[int, dict[str, float]]:
        """The best that weights of so many bits allow here, by bits and column: decoding reads every weight once a
        step, a prompt's products run as fast as one large product, a start imports torch."""
        machine = medians(self.machine)
        found = {}
        for bits in _BITS:
            step = self.parameters.all * bits / 8 / (machine[READ] * 1e9)
            prefill = machine[GEMM] * 1e12 / (2 * self.parameters.layers)
            found[bits] = {c.name: prefill if c.generated == 1 else c.prompts / step for c in CASES}
            found[bits][FIRST] = machine[IMPORT]
        return found


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """By name."""
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]} if rounds else {}


def write(folder: Path, name: str, measured: Measured) -> None:
    """``name``.json, .md and .svg in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(to_plain(measured), indent=1))
    (folder / f"{name}.md").write_text(to_markdown(measured, name))
    plot(measured, folder / f"{name}.svg")


def to_plain(measured: Measured) -> dict[str, Any]:
    """For the JSON file: medians first, then all rounds."""
    found = measured.medians()
    systems = {
        name: {"bits": measured.bits[name], "median": _rounded(found[name]), "rounds": [_rounded(r) for r in rounds]}
        for name, rounds in measured.figures.items()
    }
    machine = {"median": _rounded(medians(measured.machine)), "rounds": [_rounded(r) for r in measured.machine]}
    return {
        **measured.about, "parameters": measured.parameters._asdict(), "machine can": machine,
        "floors": {f"{bits} bits": _rounded(floor) for bits, floor in measured.floors().items()},
        "systems": systems, "not available": measured.missing,
    }  # fmt: skip


def to_markdown(measured: Measured, name: str) -> str:
    """The tables."""
    found, floors, about = measured.medians(), measured.floors(), measured.about
    machine, reads = medians(measured.machine), [m[READ] for m in measured.machine]
    slowest, fastest, rounds = min(reads), max(reads), max(map(len, measured.figures.values()))
    lines = [
        "# Qwen2.5-0.5B shape, random weights: graphllm beside other systems on a CPU", "",
        f"{about['machine']}, {about['threads']} threads, {about['date']}: `{about['command']}`. Medians of "
        f"{rounds} {'round' if rounds == 1 else 'rounds'}; in each, every system runs once, in a fresh process. "
        "128 tokens in, 64 out; files in the page cache. "
        f"Memory is read at {machine[READ]:.1f} GB/s ({slowest:.1f} to {fastest:.1f} before and after each round), "
        f"a bf16 product runs at {machine[GEMM]:.2f} TFLOP/s. Everything is in `{name}.json`.", "",
        f"![plot]({name}.svg)", "",
    ]  # fmt: skip
    for bits in _BITS:
        rows = {n: m for n, m in found.items() if measured.bits[n] == bits and ", " not in n}
        if rows:
            lines += [f"## {bits}-bit weights", "", *table({"floor": floors[bits], **rows}, COLUMNS), ""]
    lines += reach(measured)
    if measured.missing:
        lines += ["## Not available", "", *(f"- {n}: {reason}" for n, reason in measured.missing.items()), ""]
    versions = ", ".join(f"{package} {v}" for package, v in about["versions"].items())
    lines += [
        "## How it was measured", "",
        f"Versions: {versions}; {about['system']}.", "",
        "The floor reads the weights once a step, without the scales of quantized ones; a prompt's products at the "
        "speed of one large product, without attention and the first and last layer; a start that only imports "
        "torch. Decode counts from when every prompt has its first token. Start is from the process's start to the "
        "first token of a prompt of 16. OpenVINO's and llama.cpp's files are made from the same numbers; each "
        "system's own defaults otherwise.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def reach(measured: Measured) -> list[str]:
    """How much of the kernels' speed gets through the engine and through the server."""
    found = measured.medians()
    lines: list[str] = []
    for kind in ("bf16", "int8", "int4"):
        names = {way: f"{OURS} {kind}{suffix}" for way, suffix in WAYS.items()}
        if not all(n in found for n in names.values()):
            continue
        whole = found[names["executor"]]
        rows: dict[str, dict[str, float]] = {}
        for way, n in names.items():
            rows[f"{kind}, {way}"] = found[n]
            if way != "executor":
                rows[f"{kind}, {way}: share"] = {c.name: found[n][c.name] / whole[c.name] for c in CASES}
        lines += [*table(rows, [*(c.name for c in CASES), FIRST]), ""]
    return ["## From the kernels to the user", "", *lines] if lines else []


def table(rows: dict[str, dict[str, float]], columns: Iterable[str]) -> list[str]:
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
        for floor, bits in {floors[b][column]: b for b in reversed(_BITS)}.items():  # equal ones in the first's color
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


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}
