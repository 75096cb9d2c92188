"""Tuning: at compile time, on the GPU, the implementations of an op are timed at every site where they have launch
constants to choose among. The results are kept next to the artifacts, for the next compile on the same machine.

Worker processes compile kernels into Triton's cache and do not run them. At the same time this process times finished
candidates. Each timing includes a short following kernel, because some kernels let the next one start early. Calls with
equal arguments are timed once, in whichever bucket they occur.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from graphllm.compile.codegen.example_inputs import example
from graphllm.compile.codegen.jobs import Candidate, Tunable
from graphllm.compile.codegen.objects import BuildError
from graphllm.compile.passes import pipeline
from graphllm.compile.specialize import specialize
from graphllm.compile.tuning.known import NOTHING, KnownSite, Table, known_site, table_of
from graphllm.compile.tuning.workers import Workers
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.op import all_ops, op_of
from graphllm.program.expr import value
from graphllm.rewrite import ImplChoice, choices, fake_values, site_key, site_of

_COLD_BYTES = 256 * 2**20  # calls in turn over weights of this size find none of them in a cache
_MOST_COPIES = 32
_SHORT_ROW = 1024  # numbers


class Measured(NamedTuple):
    """What was chosen at a site, and what each candidate took, by description; nothing where a table knew it."""

    choice: ImplChoice
    microseconds: dict[str, float]


class _Problem(NamedTuple):
    """Sites with equal arguments, by key, and why each candidate cannot be compiled, once that is known.

    known: a table says that the only candidate is the fastest; it is not timed.
    others: candidates that a table says are slower; they are tried if no other can be compiled.
    """

    site: Tunable
    keys: list[str]
    problems: list[concurrent.futures.Future[str]]
    known: bool
    others: list[ImplChoice]


class Tuner:
    """Finds the fastest implementation and launch constants on this GPU at every site that has some to choose among.
    What a table knows to be the fastest is only compiled, early: processes that build pieces find it in Triton's cache.

    workers: processes that find sites and compile candidates.
    progress: called with the number of timed candidates and of known ones.
    folder: keeps the results for later compiles.
    measured: the results so far, by `site_key`.
    seconds: time spent on timing candidates.
    """

    def __init__(
        self,
        config: CompileConfig,
        workers: Workers | None,
        progress: Callable[[int, int], None],
        folder: Path | None,
    ) -> None:
        self._config, self._workers, self._progress = config, workers, progress
        self._file = folder / f"{fingerprint(config)}.json" if folder else None
        self._kept = read_measured(self._file) if self._file else {}
        self._known = NOTHING if config.tune_all else table_of(config.target)
        self._problems: dict[str, _Problem] = {}
        self.measured: dict[str, Measured] = {}
        self.seconds = 0.0

    def find(self, piece: Mapping[str, Any], bucket: Bucket) -> Callable[[], dict[str, Tunable]]:
        """Have a piece's sites found for a bucket; what waits for them, or does it."""
        if self._workers is None:
            return functools.partial(tunables, [(piece, bucket)], self._config)
        return self._workers.sites(piece, bucket).result

    def add(self, sites: Mapping[str, Tunable]) -> set[str]:
        """Have the candidates of these sites compiled; the keys of those that are not known yet."""
        for key, site in sites.items():
            if key in self._kept and self._kept[key].choice in site.candidates:
                self.measured[key] = self._kept[key]
            if key not in self.measured:
                same = self._problems.get(text := _equal_to(site))
                if same is None:
                    choice = self._known.chosen(site)
                    few = [choice] if choice else self._known.likely(site)
                    others = [other for other in site.candidates if other not in few]
                    site = site._replace(candidates=few)
                    same = _Problem(site, [], self._compile(site), choice is not None, others)
                    self._problems[text] = same
                if key not in same.keys:
                    same.keys.append(key)
        return {key for key in sites if key not in self.measured}

    def results(self) -> Iterator[str]:
        """Time the candidates of what was added, as they come; each key, once `measured` has it."""
        total, done = self.counts["candidates"], 0
        for problem in _as_compiled(sorted(self._problems.values(), key=lambda p: not p.known)):
            if not problem.known:
                self._progress(done, total)
                done += len(problem.site.candidates)
            self.measured |= dict.fromkeys(problem.keys, self._measured(problem))
            yield from problem.keys
        timed = {k: self.measured[k] for p in self._problems.values() for k in p.keys if self.measured[k].microseconds}
        if self._file and timed:
            write_measured(self._file, self._kept | timed)
            if self._config.tune_all:
                rows = [known_site(p.site, self.measured[p.keys[0]].choice) for p in self._problems.values()]
                write_sites(self._file.with_suffix(".sites"), rows)

    @property
    def counts(self) -> dict[str, int]:
        """How much there is to do: sites, sites with different arguments, and candidates at the latter."""
        problems = [p for p in self._problems.values() if not p.known]
        return {
            "sites": sum(len(p.keys) for p in problems),
            "timed": len(problems),
            "candidates": sum(len(p.site.candidates) for p in problems),
        }

    def _compile(self, site: Tunable) -> list[concurrent.futures.Future[str]]:
        if self._workers is None:
            return []
        return [self._workers.problem(Candidate(site, choice)) for choice in site.candidates]

    def _measured(self, problem: _Problem) -> Measured:
        site = problem.site
        problems = [future.result() for future in problem.problems] or [""] * len(site.candidates)
        usable = [c for c, why in zip(site.candidates, problems, strict=True) if not why]
        if problem.known and usable:
            return Measured(usable[0], {})
        if problem.others and not usable:
            site = site._replace(candidates=problem.others)
            return self._measured(problem._replace(site=site, problems=self._compile(site), known=False, others=[]))
        try:
            begin = time.perf_counter()
            found, failed = measure(site, usable)
            self.seconds += time.perf_counter() - begin
        except torch.OutOfMemoryError as full:
            free, total = (size / 1e9 for size in torch.cuda.mem_get_info())
            raise ConfigError(
                f"tune: {free:.1f} of {total:.1f} GB are free on the GPU, too little to measure kernels; end what else "
                "uses it, or compile with --no-tune"
            ) from full
        if found is None:
            reason = [p for p in (*problems, *failed) if p][-1]
            given = site.tensors | site.plain
            raise BuildError(f"no implementation of {site.op} runs on this GPU with {given}: {reason}")
        return found


def _as_compiled(problems: Iterable[_Problem]) -> Iterator[_Problem]:
    """Each once its candidates are compiled; of several, the one that was added first."""
    waiting = list(problems)
    while waiting:
        compiled = next((p for p in waiting if all(f.done() for f in p.problems)), None)
        if compiled is None:
            unfinished = [f for p in waiting for f in p.problems if not f.done()]
            concurrent.futures.wait(unfinished, return_when=concurrent.futures.FIRST_COMPLETED)
            continue
        waiting.remove(compiled)
        yield compiled


def _equal_to(site: Tunable) -> str:
    """The same text for sites with equal arguments and the same candidates."""
    tensors = {
        n: [spec.dtype, *([value(d, site.sizes) for d in dims] for dims in (spec.shape, spec.stride))]
        for n, spec in site.tensors.items()
    }
    return repr((site.op, tensors, site.plain, site.candidates))


def tunables(pieces: Sequence[tuple[Mapping[str, Any], Bucket]], config: CompileConfig) -> dict[str, Tunable]:
    """The sites to tune in pieces at their buckets, by key."""
    found: dict[str, Tunable] = {}
    for piece, bucket in pieces:
        sizes = bucket.limits(config.max_num_seqs, config.longest_query)
        unit = specialize(piece, bucket, config, pipeline().pieces).unit
        for node in unit.graph.nodes:
            op = op_of(node.target)
            if op is None or not op.tunable:
                continue
            args, kwargs = fake_values((node.args, node.kwargs))
            site = site_of(op, op.bind(args, kwargs), unit.shapes, config, bucket)
            offered = choices(op, site)
            if len(offered) > 1:
                specs = {n: unit.shapes.spec(v) for n, v in site.args.items() if isinstance(v, torch.Tensor)}
                plain = {n: v for n, v in site.args.items() if n not in specs}
                key = site_key(node, op, unit.shapes, bucket)
                found[key] = Tunable(op.name, specs, plain, sizes, offered, site.deterministic)
    return found


def fingerprint(config: CompileConfig) -> str:
    """What choices depend on, apart from the site: the GPU, the versions, the kernels' sources, and whether all
    candidates were there."""
    import triton

    sources = hashlib.sha256()
    for file in sorted({f for op in all_ops().values() for f in op.folder.glob("*.py")}):
        sources.update(file.read_bytes())
    factors = [config.target.name, *config.target.arch, torch.__version__, triton.__version__, sources.hexdigest()]
    factors += ["deterministic"] if config.deterministic else []
    return hashlib.sha256("\n".join(factors).encode()).hexdigest()[:16]


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


def write_sites(file: Path, found: Sequence[KnownSite]) -> None:
    """Add rows for tables to what earlier compiles found."""
    earlier = msgspec.json.decode(file.read_bytes(), type=list[KnownSite]) if file.exists() else []
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(list(Table.of([*earlier, *found]).exact.values())))
    partial.replace(file)


def build_candidate(tunable: Tunable, choice: ImplChoice) -> str:
    """Compile the kernels of one candidate, running none; why that is impossible, empty where it is not. For worker
    processes."""
    given = tunable.plain | {n: example(s, tunable.sizes, "meta") for n, s in tunable.tensors.items()}
    try:
        _calls(tunable, choice, [given])[0]()
    except Exception as error:
        return _explained(choice, error)
    return ""


def _explained(choice: ImplChoice, error: Exception) -> str:
    return f"{choice}: {type(error).__name__}: {error}"


def measure(tunable: Tunable, candidates: Sequence[ImplChoice]) -> tuple[Measured | None, list[str]]:
    """Time the candidates: what was found, if any of them runs, and why the others do not."""
    inputs = inputs_of(tunable, _MOST_COPIES)
    short = _short_kernel(tunable.sizes["T"])
    short_only = microseconds([short] * len(inputs))
    taken, failed = list[tuple[float, ImplChoice]](), []
    for choice in candidates:
        try:
            both = microseconds([c for call in _calls(tunable, choice, inputs) for c in (call, short)])
            taken.append((2 * both - short_only, choice))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as a kernel that takes more shared memory than there is
            failed.append(_explained(choice, error))
    named = {str(choice): round(t, 2) for t, choice in taken}
    best = min(taken, key=lambda one: one[0], default=None)
    return Measured(best[1], named) if best else None, failed


def inputs_of(tunable: Tunable, most: int, device: str = "cuda") -> list[dict[str, Any]]:
    """Arguments for at most ``most`` calls in turn. They differ in their largest tensor, the weights or a cache. They
    are scratch: a call may write into them."""
    made = {n: example(s, tunable.sizes, device) for n, s in tunable.tensors.items()}
    given = all_ops()[tunable.op].with_tuning_inputs(tunable.plain | made)
    largest = max(made, key=lambda n: given[n].nbytes)
    copies = min(most, max(3, -(-_COLD_BYTES // max(given[largest].nbytes, 1))))
    return [given, *({**given, largest: given[largest].clone()} for _ in range(copies - 1))]


def _calls(tunable: Tunable, choice: ImplChoice, inputs: Sequence[Mapping[str, Any]]) -> list[Callable[[], Any]]:
    fn = all_ops()[tunable.op].impls[choice.impl].fn
    return [functools.partial(fn, **given, **choice.config) for given in inputs]


def _short_kernel(T: int) -> Callable[[], Any]:
    """A norm of T rows: it starts while the kernel before it runs, and lets the one after it start."""
    from graphllm.ops.gemm.fused_linear.triton_fused_linear import launch_norm

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
