"""Draws the diagrams of the docs: NAME.txt -> NAME.svg, for light and dark. `python docs/diagrams/draw.py` writes all.

The text: a title; under "grid" the names of boxes in their places ("." is an empty one, and a name in several places
next to each other is one large box); under "boxes" what stands in each, lines divided by " / ", the first one bold, in
color when the name has a "*"; under "arrows" `a -> b: label`, or `a <-> b`. Arrows are straight: boxes between a and b
are the writer's mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

LINE, PAD, MARGIN, GAP = 18, 14, 16, 44  # pixels; GAP: between boxes, at least
STYLE = """
svg { background: #fff; font: 13px system-ui, sans-serif; }
svg { --ink: #1f2933; --box: #f3f5f8; --edge: #8794a5; --main: #dbe9ff; }
@media (prefers-color-scheme: dark) {
  svg { background: #1b1f27; --ink: #e4e8ee; --box: #2a303b; --edge: #8492a6; --main: #25406b; }
}
text { fill: var(--ink); text-anchor: middle; } .head { font-weight: 600; }
rect { fill: var(--box); stroke: var(--edge); } .main { fill: var(--main); }
path { stroke: var(--edge); stroke-width: 1.5; fill: none; } marker path { fill: var(--edge); stroke: none; }
.label { font-size: 12px; paint-order: stroke; stroke: #fff; stroke-width: 5px; }
@media (prefers-color-scheme: dark) { .label { stroke: #1b1f27; } }
"""


class Box(NamedTuple):
    """rows, columns: where it lies in the grid, first and last."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    lines: list[str]
    main: bool


class Arrow(NamedTuple):
    start: str
    end: str
    both: bool
    label: str


def parse(text: str) -> tuple[str, dict[str, Box], list[Arrow]]:
    """Title, boxes by name and arrows. Raises KeyError for a name that is not in the grid or has no text."""
    title, grid, boxes, arrows = re.split(r"\n+(?:grid|boxes|arrows)\n", text)
    cells = [(r, c, name) for r, row in enumerate(grid.splitlines()) for c, name in enumerate(row.split())]
    found = {}
    for line in boxes.splitlines():
        name, label = line.strip().split(": ", 1)
        places = [(r, c) for r, c, cell in cells if cell == name.rstrip("*")]
        rows, columns = ({place[i] for place in places} for i in (0, 1))
        span = (min(rows), max(rows)), (min(columns), max(columns))
        found[name.rstrip("*")] = Box(*span, label.split(" / "), name.endswith("*"))
    matched = (re.fullmatch(r"\s*(\w+) (<?->) (\w+)(?:: (.*))?", line) for line in arrows.strip("\n").splitlines())
    return title.strip(), found, [Arrow(m[1], m[3], m[2] == "<->", m[4] or "") for m in matched if m]


def width(text: str) -> int:
    """Of a text, in pixels, about."""
    return round(7.2 * len(text))


def starts(sizes: dict[int, int], gaps: dict[int, int]) -> tuple[dict[int, int], int]:
    """Where rows or columns begin, and where the last one ends."""
    at, found = MARGIN, {}
    for i in sorted(sizes):
        found[i] = at
        at += sizes[i] + gaps.get(i, GAP)
    return found, at - gaps.get(max(sizes), GAP)


def largest(values: Iterable[tuple[int, int]], least: int) -> dict[int, int]:
    """The largest value of each key."""
    found: dict[int, int] = {}
    for key, value in values:
        found[key] = max(found.get(key, least), value)
    return found


def draw(text: str) -> str:
    """The SVG of a text."""
    title, boxes, arrows = parse(text)
    labels: list[tuple[int, int]] = []  # column, and the room that the label of a vertical arrow needs in it
    gaps: list[tuple[int, int]] = []
    for start, end, _, label in arrows:
        a, b = sorted((boxes[start].columns, boxes[end].columns))
        (gaps if a[1] < b[0] else labels).append((a[1] if a[1] < b[0] else b[0], width(label) + 24))
    wide = [(b.columns[0], max(map(width, b.lines)) + 2 * PAD) for b in boxes.values() if b.columns[0] == b.columns[1]]
    columns = largest([*((c, 60) for b in boxes.values() for c in b.columns), *wide, *labels], 60)
    rows = largest(
        ((r, LINE * len(b.lines) + PAD) for b in boxes.values() for r in b.rows if b.rows[0] == b.rows[1]), 32
    )
    x, right = starts(columns, largest(gaps, GAP))
    y, bottom = starts(rows, {})
    frame = {
        name: (x[b.columns[0]], y[b.rows[0]], x[b.columns[1]] + columns[b.columns[1]], y[b.rows[1]] + rows[b.rows[1]])
        for name, b in boxes.items()
    }
    drawn, texts = [], []
    for start, end, both, label in arrows:
        (ax, ay), (bx, by) = ends(frame[start], frame[end])
        tail = ' marker-start="url(#tip)"' if both else ""
        drawn.append(f'<path d="M{ax} {ay}L{bx} {by}" marker-end="url(#tip)"{tail}/>')
        above = 6 if ay == by else -4
        texts.append(f'<text class="label" x="{(ax + bx) // 2}" y="{(ay + by) // 2 - above}">{escape(label)}</text>')
    for name, (left, top, end_x, end_y) in frame.items():
        kind = ' class="main"' if boxes[name].main else ""
        drawn.append(f'<rect{kind} x="{left}" y="{top}" width="{end_x - left}" height="{end_y - top}" rx="6"/>')
        first = (top + end_y - LINE * len(boxes[name].lines)) // 2 + 13
        for i, line in enumerate(boxes[name].lines):
            head = ' class="head"' if i == 0 else ""
            texts.append(f'<text{head} x="{(left + end_x) // 2}" y="{first + i * LINE}">{escape(line)}</text>')
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6"'
    size = f"{right + MARGIN} {bottom + MARGIN}"
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{right + MARGIN}" role="img">'
    head = [
        opened,
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'{tip} orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker>',
    ]
    return "\n".join([*head, *drawn, *texts, "</svg>\n"])


def ends(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of an arrow between frames: across where they lie next to or below each other, else from corner to corner."""

    def along(i: int) -> tuple[int, int]:
        if a[i] < b[i + 2] and b[i] < a[i + 2]:  # they overlap
            return ((max(a[i], b[i]) + min(a[i + 2], b[i + 2])) // 2,) * 2
        return (a[i + 2], b[i]) if a[i] < b[i] else (a[i], b[i + 2])

    (ax, bx), (ay, by) = along(0), along(1)
    return (ax, ay), (bx, by)


if __name__ == "__main__":
    for source in Path(__file__).parent.glob("*.txt"):
        source.with_suffix(".svg").write_text(draw(source.read_text()))
