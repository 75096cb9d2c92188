"""The table of fast kernels of this GPU: `python -m bench.training.tuning_table [CACHE]`.

It is made of what `graphllm compile --tune-all` has left in a cache, and is added to the table that is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from graphllm.compile.tuning.known import TABLES, KnownSite, Table, file_name
from graphllm.config import Env
from graphllm.host.machine import detect_target


def main() -> None:
    """Add a cache's sites."""
    cache = Path(sys.argv[1]) if len(sys.argv) > 1 else Env.read().cache_dir
    files = [TABLES / file_name(detect_target("cuda")), *sorted((cache / "tuned").glob("*.sites"))]
    rows = [row for f in files if f.exists() for row in msgspec.json.decode(f.read_bytes(), type=list[KnownSite])]
    table = sorted(Table.of(rows).exact.values(), key=lambda row: (row.kind, row.sizes, row.site))
    TABLES.mkdir(exist_ok=True)
    lines = ",\n".join(msgspec.json.encode(row).decode() for row in table)
    files[0].write_text(f"[\n{lines}\n]\n")
    print(f"{files[0]}: {len(table)} sites")


if __name__ == "__main__":
    main()
