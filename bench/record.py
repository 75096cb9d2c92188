"""The record of a run: {machine, versions, command, date, case, rows}, and where it is kept."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.harness import CPUS, ROOT, Rows

RESULTS = ROOT / "bench" / "results"
UNKNOWN = "unknown"
FIELDS = ("machine", "versions", "command", "date", "case", "rows")
_PACKAGES = ("graphllm", "torch", "triton", "numpy")
_FEATURES = {"amx_bf16": "amx", "avx512_bf16": "avx512", "avx512f": "avx512", "avx2": "avx2"}  # the best first
_NOISE = r"nvidia|amd|intel|r|tm|cpu|processor|core|cores|unknown|\d+gb|hbm\d*e?|sxm\d*|pcie|nvl"


def machine(device: str) -> dict[str, Any]:
    """The machine as a record has it.

    name: of the processor, or of the GPU where ``device`` is "cuda"
    cores: CPUs of this process
    features: the widest vectors of the CPU
    gpus: how many, where ``device`` is "cuda"
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    found: dict[str, Any] = {
        "name": names[0] if names else platform.machine(), "cores": CPUS,
        "features": next((level for flag, level in _FEATURES.items() if flag in flags), ""),
    }  # fmt: skip
    if device == "cuda":
        import torch  # the host's cases run without it

        if torch.cuda.is_available():  # shapes such as tiny try a case out anywhere
            found |= {"cpu": found["name"], "name": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return {**found, "system": platform.platform()}


def folder_of(machine: dict[str, Any]) -> str:
    """The folder of a machine's results, such as "h200", "h200-x2", "xeon-amx"."""
    words = re.findall(r"[a-z0-9]+", str(machine["name"]).lower())
    kept = [word for word in words if not re.fullmatch(_NOISE, word)]
    if not kept:
        return "-".join([UNKNOWN, *([f"{cores}cpus"] if (cores := machine.get("cores", UNKNOWN)) != UNKNOWN else [])])
    gpus = machine.get("gpus")
    more = ([f"x{gpus}"] if gpus > 1 else []) if gpus else [machine["features"]] if machine.get("features") else []
    return "-".join([*kept, *more])


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python, of the installed ones of these packages and of those that all cases name; and the commit."""
    found = {"python": platform.python_version()}
    for package in dict.fromkeys((*_PACKAGES, *packages)):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "commit": commit()}


def commit() -> str:
    """The tree's short hash, with a + when files differ from it; "unknown" without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def record(case: str, device: str, command: str, packages: Iterable[str], rows: Rows) -> dict[str, Any]:
    """Of a run that ends now."""
    values = (machine(device), versions(packages), command, time.strftime("%Y-%m-%d"), case, rows)
    return dict(zip(FIELDS, values, strict=True))


def place_of(record: dict[str, Any], out: Path | None) -> Path:
    """The file of a record. out: a file, or a folder in which it is MACHINE/CASE.json; None for bench/results."""
    if out is not None and out.suffix == ".json":
        return out
    return (out or RESULTS) / folder_of(record["machine"]) / f"{record['case']}.json"


def write(record: dict[str, Any], file: Path) -> None:
    """Replace the file as a whole, so that an end of the process leaves the last state."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(to_text(record))
    os.replace(part, file)


def to_text(record: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    head = {name: record[name] for name in FIELDS[:-1]}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in record["rows"].items())
    return json.dumps(head, indent=1).removesuffix("\n}") + ',\n "rows": {\n' + rows + "\n }\n}\n"


def read(machine: str, case: str) -> Rows:
    """The rows of a result."""
    rows: Rows = json.loads((RESULTS / machine / f"{case}.json").read_text())["rows"]
    return rows
