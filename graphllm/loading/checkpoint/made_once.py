"""Folders that are made once from other files and stay in the cache, named after those files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphllm.config import Env
from graphllm.host.build_lock import build_lock
from graphllm.program import artifact


def file_facts(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """What tells a file from an older one of the same name: (path, bytes, nanoseconds of the last change)."""
    stats = [file.stat() for file in files]
    return [(str(f.resolve()), s.st_size, s.st_mtime_ns) for f, s in zip(files, stats, strict=True)]


def made_once(what: str, facts: Sequence[Any], write: Callable[[Path, Path], None]) -> Path:
    """The folder made from what ``facts`` describe.

    what: the first part of its name.
    facts: JSON; other facts give another folder.
    write: fills a new folder, its first argument, that becomes the second one when all is written.
    """
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    place = Env.read().cache_dir / "converted" / f"{what}-{key}"
    if place.is_dir():
        return place
    with build_lock(place):
        if not place.is_dir():
            building = artifact.begin(place)
            try:
                write(building, place)
                building.rename(place)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
    return place
