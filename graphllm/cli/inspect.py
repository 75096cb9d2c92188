"""`graphllm inspect`: a readable summary of an artifact. Reads the manifest only, no torch."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from graphllm.cli.inspect_adapter import inspect_adapter, is_adapter
from graphllm.config import Bucket
from graphllm.config.setting import size_text
from graphllm.program import artifact, baked_table
from graphllm.program.manifest import OrdinaryOps


def inspect(folder: Path, json: bool) -> None:
    """Print what an artifact or a LoRA adapter holds. An artifact is verified first, also the weights in it."""
    if is_adapter(folder):
        inspect_adapter(folder, json)
        return
    opened = artifact.Artifact.open(folder)
    if opened.is_baked:
        baked_table.check_contents(folder)
    if json:
        print(json_module.dumps(artifact.read_json(folder), indent=1))
        return
    console = Console()
    manifest, factors, compiled = opened.manifest, opened.manifest.factors, opened.config
    console.print(f"[bold]{folder}[/bold]  key {artifact.key_of(factors)[:16]}")
    target = compiled.target
    console.print(f"target    {target.device}: {manifest.made_with['machine']} ({' '.join(target.arch[:3])} ...)")
    versions = ", ".join(f"{k} {v}" for k, v in factors.versions.items())
    console.print(f"versions  graphllm {factors.graphllm['version']} ({factors.graphllm['source']}), {versions}")
    rounded = f", weights {compiled.quantization}" if compiled.quantization else ""
    cache = f", cache {compiled.kv_cache_dtype}" if compiled.kv_cache_dtype != "auto" else ""
    origin = manifest.origin
    if origin.get("commit"):
        console.print(f"from      {origin['name']}, commit {origin['commit']}")
    console.print(
        f"model     {', '.join(factors.model.get('architectures', ['?']))}, {compiled.dtype}{rounded}{cache}, "
        f"backend {compiled.backend}"
    )
    console.print(f"code      {manifest.implementation}")
    console.print(
        f"limits    {compiled.max_model_len} tokens of context, {compiled.max_num_seqs} sequences and "
        f"{compiled.max_num_batched_tokens} tokens a step, blocks of {compiled.block_size}"
    )
    if manifest.memory.snapshot:
        each = manifest.memory.state_of_sequence
        console.print(
            f"states    {size_text(each)} a sequence, {size_text(each * (compiled.max_num_seqs + 1))} for all"
        )
        snapshot, usual = manifest.memory.snapshot, compiled.usual_snapshots
        kind = "" if compiled.snapshot_dtype == "auto" else f" in {compiled.snapshot_dtype}"
        console.print(
            f"snapshots {size_text(snapshot)} each{kind}; by default {usual} of them, {size_text(usual * snapshot)}, "
            "but at most an eighth of the cache's memory"
        )
    pieces = Table("piece", *(_bucket(b) for b in compiled.buckets), title="pieces and kernels")
    for name, buckets in manifest.pieces.items():
        pieces.add_row(name, *(_kernels(chosen) for chosen in buckets.values()))
    console.print(pieces)
    if ordinary := manifest.implementation.ordinary:
        console.print(_ordinary(ordinary))
    passes = Table("pass", "numerics", "unit", "changed", "ms", title="passes")
    for p in manifest.passes:
        passes.add_row(p["pass"], p["numerics"], p["unit"], str(p["changed"]), str(p["ms"]))
    console.print(passes)
    memory = Table("what", "bytes", title="memory")
    for name, amount in msgspec.to_builtins(manifest.memory).items():
        rows = amount.items() if isinstance(amount, dict) else [("", amount)]
        for part, number in rows:
            memory.add_row(f"{name} {part}".strip(), f"{number:,}")
    console.print(memory)
    weights = Table("weight", "layers", "kept as", "stored as", "bits", title="weights")
    for row in manifest.weights:
        weights.add_row(row["name"], _ranges(row["layers"]), row["kept"], row["stored"], f"{row['bits']:g}")
    console.print(weights)
    if opened.is_baked:
        console.print(f"weights   baked, {(folder / baked_table.DATA).stat().st_size:,} bytes, checksum verified")
    files = sum(size for size, _ in manifest.files.values())
    stages = ", ".join(f"{k} {v:.1f}" for k, v in manifest.seconds.items())
    console.print(f"{len(manifest.files)} files, {files:,} bytes; compiled in seconds: {stages}")
    if tuning := manifest.tuning:
        console.print(
            f"kernels timed for {tuning['seconds']:.1f} s of these: {tuning['candidates']:g} candidates at "
            f"{tuning['timed']:g} of {tuning['sites']:g} sites, the others being equal"
        )
    if compilers := ", ".join(f"{k} {v:.1f}" for k, v in manifest.compilers.items()):
        console.print(f"C++ compilers in parallel, in seconds: {compilers}")


def _ordinary(calls: Sequence[OrdinaryOps]) -> Table:
    """What of transformers' code became no op of graphllm."""
    found = Table("unit", "call", "why", "times a step", "of its bytes", title="ordinary ops, compiled by Inductor")
    for c in calls:
        share = "?" if c.share is None else f"{c.share:.1%}"
        found.add_row(c.unit, c.what, c.why, str(c.times), share)
    return found


def _ranges(numbers: list[int]) -> str:
    """0..3, 5 for 0, 1, 2, 3 and 5."""
    found = [[n, n] for n in numbers[:1]]
    for n in numbers[1:]:
        if n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in found)


def _bucket(b: Bucket) -> str:
    """Kind and sizes of a bucket; several tokens a sequence where drafts are verified."""
    verifies = f" of {b.query_len} tokens" if b.query_len > 1 else ""
    return f"{b.kind} {b.lo}..{b.hi}{verifies}"


def _kernels(chosen: list[str]) -> str:
    """What runs where: each op with the implementation it got, those without one, and what is interpreted."""
    if chosen == ["all: reference"]:
        return "interpreted"
    compiled = Counter(c.removesuffix(": reference") for c in chosen if c.endswith(": reference"))
    named = _counted(Counter(c for c in chosen if not c.endswith(": reference")))
    rest = [f"{', '.join(_counted(compiled))}: compiled by Inductor"] if compiled else []
    return "\n".join([*named, *rest]) or "compiled by Inductor"


def _counted(counts: Counter[str]) -> list[str]:
    return [f"{n} x {name}" if n > 1 else name for name, n in counts.items()]
