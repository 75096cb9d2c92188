"""`graphllm doctor`: what this machine can do, whether an artifact fits it, how far its steps are from what the machine
allows, and what to do about each finding."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from graphllm.cli.doctor.timing import times_of
from graphllm.cli.late import call
from graphllm.config import ConfigError, Env
from graphllm.host.kernel_sources import LOOPS, library_name, sources
from graphllm.host.machine import available_memory, compiler_version, detect_target, usable_cores
from graphllm.host.prebuilt import find_library
from graphllm.program.artifact import Artifact
from graphllm.version import __version__

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "llguidance")
_READ_BYTES = 256 * 2**20  # of two, more than any cache holds
_LEAST_DISK = 2 * 10**9
_LEAST_FILES = 1024  # each connection of a server is one
_FAR = 3.0  # times the expected time of a step


class Finding(NamedTuple):
    """What is wrong and what to do about it. stops: nothing runs, or not on this device, before it is mended."""

    what: str
    remedy: str
    stops: bool = False


class Rates(NamedTuple):
    """The rates that the machine reached.

    read: bytes of memory a second.
    products: floating-point operations of matrix products a second.
    dtype: of these products.
    """

    read: float
    products: float
    dtype: str


def doctor(folder: Path | None) -> int:
    """Print it all; 1 where something keeps graphllm, or this artifact, from running here, else 0."""
    console = Console()
    findings = [*_machine(console), *(_artifact(console, folder) if folder else ())]
    for finding in findings:
        mark = "[red]stops[/red]" if finding.stops else "[yellow]slow [/yellow]"
        console.print(f"{mark}  {finding.what}\n       {finding.remedy}", soft_wrap=True)
    if not findings:
        console.print("[green]nothing to mend[/green]")
    return int(any(finding.stops for finding in findings))


def _machine(console: Console) -> Iterator[Finding]:
    target, cpu = detect_target("auto"), detect_target("cpu")
    cores, load = usable_cores(), os.getloadavg()[0]
    features = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve") if f in _flags()]
    cache, free = Env.read().cache_dir, available_memory()
    disk = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    versions = {name: _version(name) for name in _PACKAGES}
    console.print(f"graphllm  {__version__}, Python {platform.python_version()}, {platform.system()}")
    console.print(f"packages  {', '.join(f'{k} {v}' for k, v in versions.items())}", soft_wrap=True)
    console.print(f"compiler  {compiler_version()}")
    console.print(f"CPU       {cpu.name}: {cores} usable cores, {' '.join(features) or 'no vector units known here'}")
    console.print(f"memory    {free / 1e9:.1f} GB available; {disk / 1e9:.1f} GB of disk for {cache}", soft_wrap=True)
    console.print(f"GPU       {target.name if target.device == 'cuda' else 'none that this torch can use'}")
    read, products, dtype = _rates(target.device, "bfloat16")
    console.print(
        f"rates     memory is read at {read / 1e9:.1f} GB/s, {dtype} products run at {products / 1e12:.2f} TFLOP/s"
    )
    libraries = [find_library(library_name(source)) for source in (*sources(), LOOPS)]
    there = sorted({str(file.parent) for file in libraries if file is not None})
    console.print(
        f"kernels   {sum(map(bool, libraries))} of {len(libraries)} are prebuilt for this CPU"
        + (f", in {', '.join(there)}" if there else ""),
        soft_wrap=True,
    )
    if compiler_version() == "none":
        whole = all(libraries)
        slower = (
            "models for a CPU run on prebuilt kernels only, a bit slower"
            if whole
            else "some models cannot run on a CPU"
        )
        yield Finding("there is no g++", f"{slower}; install it: apt install g++", not whole)
    if target.device == "cpu" and Path("/dev/nvidia0").exists():
        remedy = f"install a CUDA build of torch {versions['torch'].partition('+')[0]} from download.pytorch.org"
        yield Finding("there is an NVIDIA GPU, but torch is built for CPUs or the driver does not answer", remedy)
    if target.device == "cuda" and importlib.util.find_spec("triton") is None:
        yield Finding("Triton is missing", "models for a GPU cannot be compiled; pip install triton", True)
    if load > cores / 2:
        yield Finding(
            f"other programs keep {load:.1f} of {cores} cores busy", "steps wait for them; end them, or give graphllm "
            "cores of its own (taskset) and as many --threads",
        )  # fmt: skip
    if disk < _LEAST_DISK:
        remedy = "artifacts may not fit; set GRAPHLLM_CACHE to a folder on a larger disk"
        yield Finding(f"{disk / 1e9:.1f} GB of disk are left for {cache}", remedy)
    if files < _LEAST_FILES:
        remedy = f"a server serves fewer clients than that; ulimit -n {_LEAST_FILES * 4}"
        yield Finding(f"a process may open {files} files", remedy)


def _flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else set()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _artifact(console: Console, folder: Path) -> Iterator[Finding]:
    artifact = Artifact.open(folder)
    compiled, memory = artifact.config, artifact.memory
    console.print(f"artifact  {folder}, {artifact.device}, {compiled.dtype}, {compiled.backend}")
    try:
        artifact.check_machine()
    except ConfigError as other:
        yield Finding(str(other), "graphllm compile makes it for this machine", True)
        return
    need = memory.weights + memory.arena + memory.state + memory.block * memory.blocks_of_sequence
    on_gpu = artifact.device == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else available_memory()
    console.print(f"          needs {need / 1e9:.2f} GB for one longest sequence, {free / 1e9:.1f} GB are free")
    if need > free:
        offload = f", serve with --cpu-offload-gb {math.ceil((need - free) / 2**30) + 1} or more" if on_gpu else ""
        remedy = f"use --quantization, a smaller --max-model-len{offload}, or end what else uses the memory"
        yield Finding(f"it needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free", remedy, True)
        return
    if compiled.backend == "eager":
        yield Finding(
            "it is interpreted (backend eager)", "compile with --backend inductor, which is many times as fast"
        )
        return
    if compiled.backend == "prebuilt":
        yield Finding("it runs on prebuilt kernels", "graphllm compile makes code of the model's own, which is faster")
    rates = _rates(artifact.device, compiled.dtype)
    table = Table("step", "expected, ms", "seen, ms", "times", title="full steps of each bucket, nothing in the cache")
    far = []
    for name, seconds in call("doctor.steps:full_steps", artifact).items():
        cost = artifact.manifest.cost[name]
        expected = max(cost.bytes / rates.read, cost.flops / rates.products)
        table.add_row(name, f"{1e3 * expected:.3f}", f"{1e3 * seconds:.3f}", f"{seconds / expected:.2f}")
        if seconds > _FAR * expected:
            far.append(f"{name} {seconds / expected:.1f}")
    console.print(table)
    if far:
        yield Finding(
            f"steps take more than {_FAR:g} times as long as reading weights and computing: {', '.join(far)}",
            "usual where steps are short or memory is read from a cache; otherwise see what else runs here, --threads, "
            "and `graphllm inspect` for what has no kernel",
        )


def _rates(device: str, dtype: str) -> Rates:
    """Of one dot product of long vectors and of one product of square matrices, the best of some. A CPU that has no
    vectors for half precision computes in float32, and torch takes 95 s for such a product in bfloat16 on an EPYC."""
    if device == "cpu" and not _flags() & {"avx512f", "bf16"}:
        dtype = "float32"
    first, second = (torch.ones(_READ_BYTES // 4, device=device) for _ in range(2))
    side = 8192 if device == "cuda" else 2048
    square = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)

    def seconds(call: Callable[..., torch.Tensor], *operands: torch.Tensor) -> float:
        return min(times_of(lambda: call(*operands)[..., -1:].cpu()))  # on a GPU, copying waits

    read = seconds(lambda a, b: torch.dot(a, b).reshape(1), first, second)
    return Rates(2 * _READ_BYTES / read, 2 * side**3 / seconds(torch.matmul, square, square), dtype)
