"""Folders that the training scripts write."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to be filled, which then takes its place, readable by all: nobody sees half of it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent))
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if out.exists():
        old = Path(tempfile.mkdtemp(dir=out.parent))
        out.rename(old / out.name)
        folder.rename(out)
        shutil.rmtree(old)
    else:
        folder.rename(out)
