"""The tour quotes code that stands in the named files, the glossary names files that exist, and both are linked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
QUOTES = re.findall(r'```python title="([^"]+)"\n(.*?)```', (DOCS / "tour.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(("name", "quote"), QUOTES, ids=[name for name, _ in QUOTES])
def test_what_the_tour_quotes_stands_in_the_file(name: str, quote: str) -> None:
    """Line by line, in the same order; "..." stands for any lines, without it a line follows the one before it."""
    lines = [line.rstrip() for line in (ROOT / name).read_text().splitlines()]
    at, skips = 0, True
    for line in quote.splitlines():
        if line.strip() == "...":
            skips = True
            continue
        found = next((i for i in range(at, len(lines) if skips else at + 1) if lines[i : i + 1] == [line]), None)
        assert found is not None, f"docs/tour.md quotes a line that {name} does not have here: {line.strip()}"
        at, skips = found + 1, False


def test_the_tour_is_short_enough_for_a_day() -> None:
    files = dict.fromkeys(name for name, _ in QUOTES)
    assert 12 <= len(files) <= 24
    assert sum(len((ROOT / name).read_text().splitlines()) for name in files) < 6000
    assert max(quote.count("\n") for _, quote in QUOTES) <= 20


def test_each_entry_of_the_glossary_names_a_file() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|(.*)\|$", (DOCS / "glossary.md").read_text(), flags=re.MULTILINE)
    assert len(rows) > 40
    assert [word for word, rest in rows if not re.search(r"`[\w./-]+/[\w.-]*`", rest)] == []
    words = [word.lower() for word, _ in rows]
    assert sorted(words) == words


def test_readme_links_tour_and_glossary() -> None:
    text = (ROOT / "README.md").read_text()
    assert "docs/tour.md" in text
    assert "docs/glossary.md" in text
