"""The rows of docs/compatibility.md: what happens to names of vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphllm.config.vllm.names import ForeignName


def states(works: Mapping[str, str], others: Mapping[str, ForeignName]) -> list[tuple[str, str]]:
    """A row for each name. works: names that do, with what they are. others: names that mean or change nothing."""
    rows = {name: f"works: {help}" for name, help in works.items()}
    rows |= {name: state(entry) for name, entry in others.items()}
    return [(f"`{name}`", text) for name, text in sorted(rows.items())]


def state(entry: ForeignName) -> str:
    """What happens to a name that there is not here, by its values."""
    if entry.means is not None:
        return f"works: means {entry.remedy}"
    if entry.hint:
        return f"accepted: any value; {entry.remedy}"
    neutral = ", ".join(f"`{value}`" for value in (None, *entry.neutral) if value != "")
    return f"accepted: {neutral}; others are refused: {entry.remedy}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
