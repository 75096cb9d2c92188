"""The docs site builds without a warning, has every page, loads nothing from elsewhere; its diagrams are current."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text()
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
        assert f'href="{page.stem}.html"' in index, f"mkdocs.yml: no entry for {page.name}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//')
    for page in site.rglob("*.html"):
        assert not (found := loaded.search(page.read_text())), f"{page.name}: {found}"


def test_files_that_are_no_pages_are_named(site: Path) -> None:
    page = (site / "adding-an-op.html").read_text()
    assert "examples/plugin_op" in page
    assert 'href="examples' not in page
    assert not list(site.rglob("*.py"))


def test_diagrams_are_current() -> None:
    """Each is what its text gives, and is shown on a page."""
    spec = importlib.util.spec_from_file_location("draw", DOCS / "diagrams" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    texts = list((DOCS / "diagrams").glob("*.txt"))
    assert len(texts) == 7
    for text in texts:
        assert text.with_suffix(".svg").read_text() == module.draw(text.read_text()), text.name
        assert f"diagrams/{text.stem}.svg" in pages
