"""Tuning: at compile time, on the GPU, the implementations of an op are timed at every site where they have launch
constants to choose among. What was found is kept beside the artifacts, for the next compile on the same machine.

Kernels are built by the worker processes, which leaves them in Triton's cache; the timing is done by one process, with
a short kernel after each call, as in a model: kernels that start early save time there that others take.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphllm.compile.cuda import example
from graphllm.compile.objects import BuildError
from graphllm.compile.specialize import specialize
from graphllm.compile.workers import Candidate, Workers
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import all_ops, op_of
from graphllm.rewrite import ImplChoice, choices, fake_values, site_key, site_of

_COLD_BYTES = 256 * 2**20  # calls in turn over weights of this size find none of them in a cache
_MOST_COPIES = 32
_SHORT_ROW = 1024  # numbers


class Tunable(NamedTuple):
    """A site with more than one candidate. args: a `TensorSpec` for each tensor. sizes: T and S to run at."""

    op: str
    args: dict[str, Any]
    sizes: dict[str, int]
    candidates: list[ImplChoice]


class Measured(NamedTuple):
    """What was chosen at a site, and what each candidate took, by description."""

    choice: ImplChoice
    microseconds: dict[str, float]


def tune(
    pieces: Sequence[tuple[Mapping[str, Any], Bucket]],
    config: CompileConfig,
    workers: Workers | None,
    progress: Callable[[int, int], None],
    folder: Path | None,
) -> dict[str, Measured]:
    """The fastest implementation and launch constants on this GPU at every site that has some to choose among, by
    `site_key`. pieces: each with a bucket that it is built for. workers: processes to build candidates in. folder:
    where what was found is kept for later compiles."""
    sites = tunables(pieces, config)
    file = folder / f"{fingerprint(config)}.json" if folder else None
    known = read_measured(file) if file else {}
    new = {key: site for key, site in sites.items() if key not in known}
    jobs = [(key, choice) for key, site in new.items() for choice in site.candidates]
    usable: dict[str, list[ImplChoice]] = {key: [] for key in new}
    for i, problem in enumerate(_problems([(new[key], choice) for key, choice in jobs], workers)):
        progress(i, len(jobs))
        key, choice = jobs[i]
        if not problem:
            usable[key].append(choice)
        elif choice is new[key].candidates[-1] and not usable[key]:
            raise BuildError(f"no implementation of {new[key].op} runs on this GPU with {new[key].args}: {problem}")
    try:
        known |= {key: measure(site, usable[key]) for key, site in new.items()}
    except torch.OutOfMemoryError as full:
        free, total = (size / 1e9 for size in torch.cuda.mem_get_info())
        raise ConfigError(
            f"tune: {free:.1f} of {total:.1f} GB are free on the GPU, too little to measure kernels; end what else "
            "uses it, or compile with --no-tune"
        ) from full
    if file and new:
        write_measured(file, known)
    return {key: known[key] for key in sites}


def _problems(jobs: Sequence[tuple[Tunable, ImplChoice]], workers: Workers | None) -> Iterator[str]:
    """Of each candidate, why it cannot be built, empty where it can."""
    if workers is None:
        yield from (build_candidate(site, choice) for site, choice in jobs)
        return
    futures = []
    for site, choice in jobs:
        tensors = {n: s for n, s in site.args.items() if isinstance(s, TensorSpec)}
        plain = {n: v for n, v in site.args.items() if n not in tensors}
        futures.append(workers.problem(Candidate(site.op, tensors, plain, site.sizes, choice)))
    yield from (future.result() for future in futures)


def tunables(pieces: Sequence[tuple[Mapping[str, Any], Bucket]], config: CompileConfig) -> dict[str, Tunable]:
    """The sites to tune in pieces at their buckets, by key."""
    found: dict[str, Tunable] = {}
    for piece, bucket in pieces:
        sizes = bucket.limits(config.max_num_seqs, config.longest_query)
        unit = specialize(piece, bucket, config).unit
        for node in unit.graph.nodes:
            op = op_of(node.target)
            if op is None or not op.tunable:
                continue
            args, kwargs = fake_values((node.args, node.kwargs))
            site = site_of(op, op.bind(args, kwargs), unit.shapes, config, bucket)
            own = [choice for choice, _ in choices(op, site)]
            if len(own) > 1:
                specs = {n: unit.shapes.spec(v) if isinstance(v, torch.Tensor) else v for n, v in site.args.items()}
                found[site_key(node, op, unit.shapes, bucket)] = Tunable(op.name, specs, sizes, own)
    return found


def fingerprint(config: CompileConfig) -> str:
    """What timings depend on beside the site: the GPU, the versions and the kernels' sources."""
    import triton

    sources = hashlib.sha256()
    for file in sorted({f for op in all_ops().values() for f in op.folder.glob("*.py")}):
        sources.update(file.read_bytes())
    told = [config.target.name, *config.target.arch, torch.__version__, triton.__version__, sources.hexdigest()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def read_measured(file: Path) -> dict[str, Measured]:
    """What earlier compiles found, by site; nothing when there is no such file."""
    if not file.exists():
        return {}
    return {key: Measured(ImplChoice(*choice), taken) for key, (choice, taken) in json.loads(file.read_text()).items()}


def write_measured(file: Path, found: Mapping[str, Measured]) -> None:
    """Keep what was found, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(found, indent=0))
    partial.replace(file)


def build_candidate(tunable: Tunable, choice: ImplChoice) -> str:
    """Compile one candidate by running it; why it could not be, empty where it could. For worker processes."""
    try:
        _calls(tunable, choice, inputs_of(tunable, 1))[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{choice}: {type(error).__name__}: {error}"
    return ""


def measure(tunable: Tunable, candidates: Sequence[ImplChoice]) -> Measured:
    """Time the candidates that could be built."""
    inputs = inputs_of(tunable, _MOST_COPIES)
    short = _short_kernel(tunable.sizes["T"])
    alone = microseconds([short] * len(inputs))
    taken = [
        microseconds([c for call in _calls(tunable, choice, inputs) for c in (call, short)]) for choice in candidates
    ]
    taken = [2 * each - alone for each in taken]
    named = {str(c): round(t, 2) for c, t in zip(candidates, taken, strict=True)}
    return Measured(candidates[min(range(len(taken)), key=taken.__getitem__)], named)


def inputs_of(tunable: Tunable, most: int, device: str = "cuda") -> list[dict[str, Any]]:
    """Arguments for at most so many calls in turn, which differ in their largest tensor, the weights or a cache. They
    are scratch: what a call writes in place is written there."""
    specs = {n: s for n, s in tunable.args.items() if isinstance(s, TensorSpec)}
    made = {n: example(s, tunable.sizes, device) for n, s in specs.items()}
    given = all_ops()[tunable.op].with_tuning_inputs({**tunable.args, **made})
    largest = max(specs, key=lambda n: given[n].nbytes)
    copies = min(most, max(3, -(-_COLD_BYTES // max(given[largest].nbytes, 1))))
    return [given, *({**given, largest: given[largest].clone()} for _ in range(copies - 1))]


def _calls(tunable: Tunable, choice: ImplChoice, inputs: Sequence[Mapping[str, Any]]) -> list[Callable[[], Any]]:
    fn = all_ops()[tunable.op].impls[choice.impl].fn
    return [functools.partial(fn, **given, **choice.config) for given in inputs]


def _short_kernel(T: int) -> Callable[[], Any]:
    """A norm of T rows: it starts while the kernel before it runs, and lets the one after it start."""
    from graphllm.ops.fused_linear.triton_fused_linear import launch_norm

    x, out = (torch.ones(T, _SHORT_ROW, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return functools.partial(launch_norm, x, x[0], 1e-6, out)


def microseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Of one call among calls back to back, replayed as one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    taken = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end))
    return statistics.median(taken) / len(calls)
