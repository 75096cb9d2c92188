"""What this machine is: the compile target and the versions that an artifact depends on. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import subprocess
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

from graphllm.config import ConfigError, Target

PLUGIN_GROUP = "graphllm.plugins"
_CGROUP = Path("/sys/fs/cgroup")

_CODEGEN_FLAGS = ("sse", "ssse3", "avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes", "vpclmulqdq", "popcnt", "abm",
                  "movbe", "adx", "sha", "asimd", "sve", "bf16", "i8mm", "fphp")  # fmt: skip


def detect_target(device: Literal["auto", "cpu", "cuda"]) -> Target:
    """The target of this machine; "auto" is CUDA when there is a GPU. Raises ConfigError when CUDA was asked for in
    vain."""
    gpu = _gpu() if device != "cpu" else None
    if gpu:
        return gpu
    if device == "cuda":
        raise ConfigError("target: cuda was asked for, but the CUDA driver shows no GPU here; use --target cpu")
    return _cpu()


def _cpu() -> Target:
    flags: list[str] = []
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, text = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = [f for f in text.split() if f.startswith(_CODEGEN_FLAGS)]
        elif key.strip() == "model name":
            name = text.strip()
    return Target("cpu", (platform.machine(), *sorted(set(flags))), name)


def _gpu() -> Target | None:
    driver = _driver()
    if driver is None:
        return None
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    major, minor = (_attribute(driver, which, device) for which in (75, 76))
    label = ctypes.create_string_buffer(128)
    driver.cuDeviceGetName(label, 128, device)
    # The number of multiprocessors is part of what kernels were tuned for.
    return Target("cuda", (f"sm_{major}{minor}", f"sms_{_attribute(driver, 16, device)}"), label.value.decode())


def gpu_memory() -> int:
    """Bytes of the first GPU's memory; 0 when there is none."""
    driver, total = _driver(), ctypes.c_size_t()
    return 0 if driver is None or driver.cuDeviceTotalMem_v2(ctypes.byref(total), 0) else total.value


def gpu_count() -> int:
    """GPUs that this process may use."""
    driver, count = _driver(), ctypes.c_int()
    return 0 if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def _driver() -> ctypes.CDLL | None:
    """The CUDA driver, initialized, if there is a GPU and this torch can use it."""
    if version("torch").endswith("+cpu"):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    return None if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value else driver


def _attribute(driver: ctypes.CDLL, which: int, device: ctypes.c_int) -> int:
    found = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(found), which, device)
    return found.value


def versions(target: Target) -> dict[str, str]:
    """Versions that an artifact needs: generated code calls into torch, cubins come from Triton."""
    found = {"torch": version("torch")}
    if target.device == "cuda":
        try:
            found["triton"] = version("triton")
        except PackageNotFoundError:
            found["triton"] = "none"
    return found


def plugins() -> dict[str, str]:
    """The installed plugins by entry point, each with a digest of its package's source. None of them is imported."""
    found = {}
    for plugin in entry_points(group=PLUGIN_GROUP):
        digest = hashlib.sha256()
        for root, file in _files_of(plugin):
            digest.update(str(file.relative_to(root.parent)).encode() + b"\0" + file.read_bytes())
        found[plugin.name] = f"{plugin.value} {digest.hexdigest()[:16]}"
    return found


def plugin_files() -> list[Path]:
    """The source of all installed plugins."""
    return [file for plugin in entry_points(group=PLUGIN_GROUP) for _, file in _files_of(plugin)]


def _files_of(plugin: EntryPoint) -> list[tuple[Path, Path]]:
    """The files of a plugin's package, each after the folder or file that the package is."""
    spec = importlib.util.find_spec(plugin.module.partition(".")[0])
    roots = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    return [(root, file) for root in map(Path, roots) for file in (source_files(root) if root.is_dir() else [root])]


def source_files(folder: Path) -> list[Path]:
    """The files of a package that may shape an artifact."""
    return [f for f in sorted(folder.rglob("*")) if f.suffix in (".py", ".cpp", ".h")]


def compiler_version() -> str:
    """What g++ calls itself; recorded in the manifest, not part of the key."""
    try:
        return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return "none"


def usable_cores() -> int:
    """CPUs this process may use at once: the CPUs of its affinity, or fewer where a control group limits their time."""
    cores = len(os.sched_getaffinity(0))
    for limits in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2 and 1
        files = [_CGROUP / name for name in limits]
        if all(f.is_file() for f in files):
            quota, period = " ".join(f.read_text() for f in files).split()
            if quota not in ("max", "-1"):
                return max(1, min(cores, int(quota) // int(period)))
    return cores


def available_memory() -> int:
    """Bytes that a process can still take without others being swapped out, or its control group's limit."""
    free = _memory("MemAvailable")
    for names in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):  # version 2, 1
        files = [_CGROUP / name for name in names]
        if all(f.is_file() for f in files):
            most, used, stat = (f.read_text().strip() for f in files)
            # Files that were read lately count as used; the system gives them up first.
            given_up = next(
                (int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0
            )
            if most != "max":
                free = min(free, max(0, int(most) - int(used) + given_up))
    return free


def total_memory() -> int:
    """Bytes of this machine's memory."""
    return _memory("MemTotal")


def _memory(which: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024
    return 4 << 30
