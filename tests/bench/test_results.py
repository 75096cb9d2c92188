"""Results have one schema, and the page that is made of them is up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import record, report
from bench.__main__ import find_cases

FILES = sorted(record.RESULTS.glob("*/*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_one_schema(file: Path) -> None:
    found = json.loads(file.read_text())
    assert tuple(found) == record.FIELDS
    assert (file.parent.name, file.stem) == (record.folder_of(found["machine"]), found["case"])
    assert isinstance(found["command"], str)
    assert all(isinstance(value, str) for value in (found["date"], *found["versions"].values()))
    assert record.to_text(found) == file.read_text()
    for row in found["rows"].values():
        assert row
        assert not [value for value in row.values() if isinstance(value, dict)]


def test_results_of_cases_and_of_studies() -> None:
    """A study is a comparison of several runs, made by hand: its name says that no case writes it."""
    assert FILES
    assert all(file.stem in find_cases() or file.stem.startswith("study_") for file in FILES)
    assert not [file.name for file in record.RESULTS.iterdir() if file.is_file() and file != report.PAGE]


def test_page_is_as_generated() -> None:
    assert report.PAGE.read_text() == report.page(), "run python -m bench report"
