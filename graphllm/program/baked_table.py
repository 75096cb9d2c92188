"""The table of baked weights: an artifact's finished parameters in ``weights.bin``, described by ``baked.json``.

The data is not read at a start: its size and its stamp show that it is the file that belongs to the table.
`check_contents` reads all of it. `graphllm.weights.loading.baked` writes and maps the data. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError

TABLE, DATA = "baked.json", "weights.bin"
FORMAT = 1
PAGE = 4096  # bytes; the first page of the data is its stamp, and every parameter begins on one
AGAIN = "compile again with --bake-weights"
_STAMP = 64  # bytes, of hex
_READ = 16 << 20  # bytes


class BakedError(ConfigError):
    """Baked weights that cannot be used. The message names the file, what is wrong, and the remedy."""


def is_baked(artifact: Path) -> bool:
    """Whether an artifact holds its weights."""
    return (artifact / TABLE).exists()


def stamp(table: Mapping[str, Any]) -> bytes:
    """What the data file begins with: it belongs to this table, and to no other."""
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest().encode()


def check(artifact: Path) -> dict[str, Any]:
    """The table. Raises BakedError unless the data file is there, whole, and the one that the table describes."""
    table, file = read_table(artifact), artifact / DATA
    try:
        with file.open("rb") as opened:
            size, found = os.fstat(opened.fileno()).st_size, opened.read(_STAMP)
    except FileNotFoundError as missing:
        raise BakedError(f"{file} is missing from the artifact; {AGAIN}") from missing
    if size != table["size"]:
        raise BakedError(f"{file} has {size} bytes, {TABLE} says {table['size']}: truncated or replaced; {AGAIN}")
    if found != stamp(table):
        raise BakedError(f"{file} is not the file that {TABLE} describes: replaced or damaged; {AGAIN}")
    return table


def made_of(artifact: Path) -> str:
    """The `sample` of the checkpoint that the weights were made of."""
    return str(read_table(artifact)["sample"])


def check_contents(artifact: Path) -> None:
    """Raise BakedError unless every byte of the data is as it was written. Reads all of it."""
    table, found = read_table(artifact), hashlib.sha256()
    with (artifact / DATA).open("rb", buffering=0) as file:
        file.seek(PAGE)
        while part := file.read(_READ):
            found.update(part)
    if found.hexdigest() != table["sha256"]:
        raise BakedError(f"{artifact / DATA} does not match its checksum: changed on disk; {AGAIN}")


def read_table(artifact: Path) -> dict[str, Any]:
    """The table. The manifest holds its checksum; here it is only that of this version."""
    table: dict[str, Any] = json.loads((artifact / TABLE).read_text())
    if table["format"] != FORMAT:
        raise BakedError(f"{artifact / TABLE}: format {table['format']!r}, this graphllm reads {FORMAT}; {AGAIN}")
    return table
