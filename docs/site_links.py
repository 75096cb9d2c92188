"""A hook of the docs site: links to files of the repository that are no pages become the names of these files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\.|examples)/[^)#\s]*)\)")


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    """The page as the site shows it. Raises ValueError for a link to nothing."""
    folder = Path(page.file.abs_src_path).parent
    root = Path(__file__).parents[1]

    def named(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        if not target.exists():
            raise ValueError(f"{page.file.src_path}: {link[0]} leads to nothing")
        path = str(target.relative_to(root))
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return _LINK.sub(named, markdown)
