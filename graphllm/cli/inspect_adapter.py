"""`graphllm inspect` of a LoRA adapter: what it changes, and whether it can be served. Reads headers only, no torch."""

from __future__ import annotations

import json as json_module
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graphllm.config import ConfigError
from graphllm.weights.adapters.adapter_files import CONFIG, Adapter, adapter_digest, open_adapter
from graphllm.weights.adapters.adapters import check_served


def is_adapter(folder: Path) -> bool:
    """Whether a folder says that it is one."""
    return (folder / CONFIG).is_file()


def inspect_adapter(folder: Path, json: bool) -> None:
    """Print modules, ranks, scales and size. Raises ConfigError for one that cannot be read."""
    facts = _facts(open_adapter(folder))
    if json:
        print(json_module.dumps(facts, indent=1))
        return
    console = Console()
    console.print(f"[bold]{folder}[/bold]  digest {facts['digest'][:16]}")
    console.print(f"base      {facts['base'] or 'not said'}")
    console.print(f"size      {facts['parameters']:,} numbers, {facts['bytes']:,} bytes, {', '.join(facts['dtypes'])}")
    console.print(f"rank      {facts['max_rank']} at most: --max-lora-rank {facts['max_rank']}")
    modules = Table("module", "of layers", "rank", "scale", "inputs", "outputs", title="modules")
    for row in facts["modules"]:
        modules.add_row(
            row["module"], str(row["count"]), str(row["rank"]), f"{row['scale']:g}", str(row["inputs"]),
            str(row["outputs"]),
        )  # fmt: skip
    console.print(modules)
    if facts["saved"]:
        console.print(f"whole     {', '.join(facts['saved'])}")
    console.print(f"served    {facts['refused'] or 'yes'}", soft_wrap=True)


def _facts(adapter: Adapter) -> dict[str, Any]:
    """As JSON. modules: one entry for all modules with the same name, rank, scale and shape."""
    equal: dict[tuple[Any, ...], int] = defaultdict(int)
    infos = list(adapter.saved.values())
    for module, pair in adapter.pairs.items():
        name = re.sub(r"\.\d+(?=\.|$)", ".*", module)
        equal[name, pair.rank, pair.scale, pair.a.shape[1], pair.b.shape[0]] += 1
        infos += [info for info in (pair.a, pair.b, pair.magnitude, pair.bias) if info is not None]
    try:
        check_served(adapter)
        refused = None
    except ConfigError as reason:
        refused = str(reason)
    columns = ("module", "rank", "scale", "inputs", "outputs")
    return {
        "folder": str(adapter.folder),
        "digest": adapter_digest(adapter.folder),
        "base": adapter.config.get("base_model_name_or_path"),
        "parameters": sum(math.prod(info.shape) for info in infos),
        "bytes": sum(info.nbytes for info in infos),
        "dtypes": sorted({info.dtype for info in infos}),
        "max_rank": max((pair.rank for pair in adapter.pairs.values()), default=0),
        "modules": [dict(zip(columns, row, strict=True)) | {"count": n} for row, n in sorted(equal.items())],
        "saved": sorted(adapter.saved),
        "refused": refused,
    }
