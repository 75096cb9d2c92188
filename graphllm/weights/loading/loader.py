"""Evaluates a weight plan: streams a checkpoint into finished parameters.

Expressions are lowered here, last, to jobs of the readers. What a concatenation, a stack, a transposition or a slice
only moves is read straight into its place in the parameter's memory. The rest is evaluated a few rows at a time where
the expression allows it, else a whole matrix at a time. So the peak of resident memory is the model and small buffers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from graphllm.host.hugepages import zeros
from graphllm.host.libraries import Libraries
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.checkpoint.files import opened
from graphllm.weights.dtypes import BY_TAG
from graphllm.weights.encodings import Encoding, encoding_of
from graphllm.weights.loading.readers import Bytes, Chunk, Loading, Progress, ReadJob, read_all
from graphllm.weights.plan import expr as ex
from graphllm.weights.plan.evaluate import encoded, evaluate
from graphllm.weights.plan.match import check_checkpoint, regions_of, tensor_of
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.simplify import Region, at_rank, is_same, region_of, simplify

_CHUNK = 16 << 20  # one read; also a slot of pinned memory
_STAGE = 1 << 20  # one read to be cast on the CPU: stays in a core's cache until it is cast
_EVALUATED = {"cpu": 1 << 20, "cuda": 4 << 20}  # what is read at once to be evaluated: malloc keeps as much and more
_ALIGN = 64  # bytes: a cache line


def load_weights(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    libraries: Libraries | None = None,
    rank: int = 0,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The finished parameters of `begin_weights`. progress: see `read_all`."""
    with begin_weights(plan, checkpoint, device, libraries, rank, names, progress) as loading:
        return loading.finish()


def begin_weights(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    device: str | torch.device,
    libraries: Libraries | None = None,
    rank: int = 0,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
    into: Mapping[str, Tensor] | None = None,
) -> Loading:
    """The parameters by name, on ``device``, as ``rank`` of a parallel group holds them. Tied ones are the same tensor.
    On a GPU they are still being read, in the place of zeros, if that takes no more of its memory: kernels may run
    with them, but their results mean nothing until then.

    names: those that are loaded, with what they are tied to; None for all. libraries: the artifact's, which make
    encoding fast; see `Encoding`. into: memory to fill, zeros; None: it is allocated. Raises WeightError before
    anything big is allocated, naming everything about the checkpoint that does not fit the plan.
    """
    device = torch.device(device)
    if (
        device.type == "cuda"
    ):  # by its number: which one is the current one is a matter of each thread, and threads read
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    check_checkpoint(plan, checkpoint)
    plan = WeightPlan(tuple(replace(e, expr=simplify(at_rank(e.expr, rank))) for e in plan.chosen(names)))
    tensors = allocate(plan, device) if into is None else {e.name: into[e.name] for e in plan}
    with contextlib.ExitStack() as stack:
        fds = stack.enter_context(opened(sorted({info.file for info in checkpoint.tensors.values()})))
        lowering = _Lowering(checkpoint, fds, libraries, _EVALUATED[device.type])
        for entry in plan:
            if not entry.tie:
                lowering.place(entry.expr, tensors[entry.name])
        return _begin(tensors, lowering.jobs(), device, stack.pop_all(), progress)


def _begin(
    tensors: dict[str, Tensor],
    jobs: Sequence[ReadJob],
    device: torch.device,
    files: contextlib.ExitStack,
    progress: Progress | None,
) -> Loading:
    """Begin the jobs; of those that take memory of a GPU none is left when this returns. files: closed at the end."""

    def read(report: Progress) -> None:
        with files:
            read_all(jobs, device, report)

    with contextlib.ExitStack() as undo:  # an interrupt ends the readers
        loading = undo.enter_context(Loading(tensors, read, progress))
        if device.type == "cpu" or not all(isinstance(job, Chunk) and job.direct for job in jobs):
            loading.finish()
        undo.pop_all()
    return loading


def begin_tensors(
    file: Path, tensors: dict[str, Tensor], places: Mapping[str, int], progress: Progress | None = None
) -> Loading:
    """Fill contiguous tensors of one device with the bytes of a file that begin at their places. Some may be the same
    one, at one place. progress: see `read_all`."""
    different = {places[name]: tensor for name, tensor in tensors.items()}
    with contextlib.ExitStack() as stack:
        fd = stack.enter_context(opened([file]))[file]
        jobs = [
            chunk
            for at, tensor in different.items()
            for chunk in _chunks(Bytes(file, fd, at, tensor.dtype, tensor.shape, tensor.stride()), tensor)
        ]
        device = next(iter(tensors.values())).device
        return _begin(tensors, jobs, device, stack.pop_all(), progress)


def allocate(plan: WeightPlan, device: torch.device) -> dict[str, Tensor]:
    """Memory for every parameter (64-byte aligned). Tied ones are the same tensor."""
    own = [e for e in plan if not e.tie]
    if device.type == "cpu":
        tensors = _in_one_block(own)
    else:
        # Zeros: what pads encoded parts is never written, and kernels may run before the others are.
        tensors = {e.name: torch.zeros(e.shape, dtype=getattr(torch, e.dtype), device=device) for e in own}
    return {e.name: tensors[e.tie or e.name] for e in plan}


def _in_one_block(entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Zeros for them, one after the other, so that few pages hold them."""
    starts = [0, *itertools.accumulate(-(-e.nbytes // _ALIGN) * _ALIGN for e in entries)]
    block = torch.from_numpy(zeros(max(1, starts[-1])))
    return {
        e.name: block[at : at + e.nbytes].view(getattr(torch, e.dtype)).view(e.shape)
        for e, at in zip(entries, starts[:-1], strict=True)
    }


@dataclass(frozen=True)
class _Packed(Chunk):
    """A read that is encoded on its way: ``dst`` is a shape without memory. row, entry: where the first number belongs
    in the matrix of ``parts``. transpose: the checkpoint stores columns."""

    encoding: Encoding
    parts: Mapping[str, Tensor]
    row: int
    entry: int
    transpose: bool
    libraries: Libraries | None

    @property
    def direct(self) -> bool:
        return False

    def put(self, numbers: Tensor) -> None:
        assert self.encoding.pack is not None
        numbers = numbers.T if self.transpose else numbers
        self.encoding.pack(numbers, self.parts, self.row, self.entry, self.libraries)


@dataclass(frozen=True)
class _Evaluation:
    """Something to be computed from ``sources``, the boxes of tensors that it reads."""

    sources: Mapping[Region, Bytes]
    compute: Callable[[Callable[[Region], Tensor]], object]

    @property
    def _first(self) -> Bytes:
        return min(self.sources.values(), key=lambda b: (b.file, b.offset))

    @property
    def file(self) -> Path:
        return self._first.file

    @property
    def offset(self) -> int:
        return self._first.offset

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.sources.values())

    @property
    def staging(self) -> int:
        return 0

    def run(self, stage: Tensor, device: torch.device) -> None:
        def fetch(region: Region) -> Tensor:
            source = self.sources[region]
            return source.read(torch.empty(source.nbytes, dtype=torch.uint8)).to(device)

        self.compute(fetch)


class _Lowering:
    """Turns simplified expressions and the memory that they shall fill into jobs.

    libraries: see `Encoding`.
    most: bytes to be evaluated at once, where an expression can be cut.
    """

    def __init__(self, checkpoint: Checkpoint, fds: Mapping[Path, int], libraries: Libraries | None, most: int) -> None:
        self._checkpoint, self._fds, self._libraries, self._most = checkpoint, fds, libraries, most
        self._jobs: list[ReadJob] = []
        self._encoded: dict[tuple[str, ex.Expr], list[dict[str, Tensor]]] = {}

    def jobs(self) -> list[ReadJob]:
        """All of them, after everything has its place."""
        for (name, matrix), wanted in self._encoded.items():
            for parts in wanted:
                self._encode(encoding_of(name), matrix, parts)
        self._encoded.clear()
        return self._jobs

    def place(self, expr: ex.Expr, dst: Tensor) -> None:
        """Jobs that fill ``dst``, which has the expression's shape."""
        if (region := region_of(expr)) is not None:
            self._jobs += _chunks(self._bytes(region), dst)
            return
        match expr:
            case ex.Values():
                dst.copy_(evaluate(expr, self._no_reads))
            case ex.Concat() | ex.Repeat():
                parts = expr.parts if isinstance(expr, ex.Concat) else (expr.part,) * expr.times
                at = 0
                for part in parts:
                    extent = part.shape[expr.dim]
                    self.place(part, dst.narrow(expr.dim, at, extent))
                    at += extent
            case ex.Stack():
                for part, into in zip(expr.parts, dst, strict=True):
                    self.place(part, into)
            case ex.Permute():
                self.place(expr.part, dst.permute([expr.dims.index(d) for d in range(dst.dim())]))
            case ex.Pad():
                extent = expr.part.shape[expr.dim]
                dst.narrow(expr.dim, 0, expr.before).fill_(expr.value)
                dst.narrow(expr.dim, expr.before + extent, expr.after).fill_(expr.value)
                self.place(expr.part, dst.narrow(expr.dim, expr.before, extent))
            case ex.Reshape() if dst.is_contiguous():
                self.place(expr.part, dst.view(expr.part.shape))
            case ex.Cast() if dst.dtype == getattr(torch, expr.dtype):
                self.place(expr.part, dst)
            case ex.Encode():
                wanted = self._encoded.setdefault((expr.encoding, expr.matrix), [])
                place = next((parts for parts in wanted if expr.part not in parts), None)
                if place is None:
                    wanted.append(place := {})
                place[expr.part] = dst
            case _:
                for dim, start, stop, part in self._cut(expr, _units(expr)):
                    self._evaluate(part, (dst.narrow(dim, start, stop - start) if dst.dim() else dst).copy_)

    def _encode(self, encoding: Encoding, matrix: ex.Expr, parts: dict[str, Tensor]) -> None:
        """Jobs that fill parts of a matrix."""
        repacked = is_same(matrix, encoding.name)
        if encoding.pack is not None and len(parts) == len(encoding.parts) and not repacked:
            self._pack(encoding, matrix, parts, 0)
            return
        rows, inner = matrix.shape

        def fill(part: ex.Expr, start: int, stop: int, fetch: Callable[[Region], Tensor]) -> None:
            made = encoded(encoding.name, part, fetch, self._libraries)
            for name, dst in parts.items():
                where = encoding.along(encoding.part(name), 0, (rows, inner)) if (start, stop) != (0, rows) else None
                if where is not None:
                    first = start // encoding.block[0] * where[1]
                    dst = dst.narrow(where[0], first, made[name].shape[where[0]])
                dst.copy_(made[name])

        try:
            units = (math.lcm(encoding.block[0], _units(matrix)[0]), 0)
            for name in parts:
                if encoding.along(encoding.part(name), 0, (rows, inner)) is None:
                    units = (0, 0)  # depends on all rows
        except ValueError:
            units = (0, 0)
        cuts = self._cut(matrix, units)
        if repacked and not all(isinstance(part, ex.Decode) for *_, part in cuts):
            cuts = [(0, 0, rows, matrix)]
        for _, start, stop, part in cuts:
            self._job(part, functools.partial(fill, part, start, stop))

    def _pack(self, encoding: Encoding, matrix: ex.Expr, parts: Mapping[str, Tensor], row: int) -> None:
        """Jobs that write a part of a matrix, from that row on, into its encoded form."""
        if isinstance(matrix, ex.Concat) and matrix.dim == 0:
            for part in matrix.parts:
                self._pack(encoding, part, parts, row)
                row += part.shape[0]
            return
        pack = encoding.pack
        assert pack is not None
        transpose = isinstance(matrix, ex.Permute)
        region = region_of(matrix.part if isinstance(matrix, ex.Permute) else matrix)
        if region is None:

            def put(numbers: Tensor, row: int, entry: int) -> None:
                pack(numbers, parts, row, entry, self._libraries)

            units = _units(matrix)
            for dim, start, _, part in self._cut(matrix, (units[0], math.lcm(units[1], encoding.block[1]))):
                at = (row + start, 0) if dim == 0 else (row, start)
                self._evaluate(part, functools.partial(put, row=at[0], entry=at[1]))
            return
        source, unit = self._bytes(region), encoding.block[1 if transpose else 0]
        row_bytes = source.strides[0] * source.dtype.itemsize
        count = max(1, _STAGE // max(1, row_bytes) // unit) * unit
        for i in range(0, source.shape[0], count):
            some = source.rows(i, min(i + count, source.shape[0]))
            at = (row, i) if transpose else (row + i, 0)
            shape = torch.empty(some.shape, device="meta")
            self._jobs.append(_Packed(some, shape, encoding, parts, *at, transpose, self._libraries))

    def _evaluate(self, expr: ex.Expr, put: Callable[[Tensor], object]) -> None:
        self._job(expr, lambda fetch: put(evaluate(expr, fetch)))

    def _job(self, expr: ex.Expr, compute: Callable[[Callable[[Region], Tensor]], object]) -> None:
        if sources := {r: self._bytes(r) for r in regions_of(expr)}:
            self._jobs.append(_Evaluation(sources, compute))
        else:
            compute(self._no_reads)

    def _cut(self, expr: ex.Expr, units: tuple[int, int]) -> list[tuple[int, int, int, ex.Expr]]:
        """The expression in slices (dim, start, stop, slice) that each read little, of rows if that does it and else of
        columns; in one where no slices do. units: they begin at multiples of these, 0 for a dimension not to be cut."""
        whole = self._nbytes(expr)
        for dim, (extent, unit) in enumerate(zip(expr.shape, units, strict=False)):
            count = max(1, self._most * extent // max(1, whole) // max(1, unit)) * unit
            if not 0 < count < extent:
                continue
            edges = [*range(0, extent, count), extent]
            slices = [(dim, a, b, simplify(ex.Slice(expr, dim, a, b))) for a, b in itertools.pairwise(edges)]
            if sum(self._nbytes(part) for *_, part in slices) <= 2 * whole:
                return slices
        return [(0, 0, expr.shape[0], expr)] if expr.shape else [(0, 0, 1, expr)]

    def _nbytes(self, expr: ex.Expr) -> int:
        return sum(self._bytes(r).nbytes for r in regions_of(expr))

    def _bytes(self, region: Region) -> Bytes:
        """Where the box of a tensor lies."""
        name = tensor_of(region.read, self._checkpoint)
        assert name is not None
        info = self._checkpoint.tensors[name]
        dtype: torch.dtype = getattr(torch, BY_TAG[info.dtype].name)
        strides = tuple(math.prod(info.shape[d + 1 :]) for d in range(len(info.shape)))
        shape, first = region.within(info.shape)
        return Bytes(info.file, self._fds[info.file], info.offset + first * dtype.itemsize, dtype, shape, strides)

    @staticmethod
    def _no_reads(region: Region) -> Tensor:
        raise AssertionError(region)


def _units(expr: ex.Expr) -> tuple[int, int]:
    """Slices of an expression that begin at multiples of these cut no encoded block, if rows stay rows in it."""
    found = list(ex.walk(expr))
    blocks = [encoding_of(e.encoding).block for e in found if isinstance(e, (ex.Decode, ex.Rounded))]
    inner = 0 if any(isinstance(e, ex.Rounded) for e in found) else math.lcm(*(b[1] for b in blocks))
    return math.lcm(*(b[0] for b in blocks)), inner


def _chunks(source: Bytes, dst: Tensor) -> Iterator[Chunk]:
    """Reads of few enough bytes that fill ``dst`` with numbers of a file."""
    if source.nbytes == 0:
        return
    if source.dense and dst.is_contiguous():
        source, dst = replace(source, shape=(dst.numel(),), strides=(1,)), dst.view(-1)
    while source.shape[0] == 1 and len(source.shape) > 1:
        source, dst = replace(source, shape=source.shape[1:], strides=source.strides[1:]), dst[0]
    staged = dst.device.type == "cpu" and not Chunk(source, dst).direct
    rows = max(1, (_STAGE if staged else _CHUNK) // (source.strides[0] * source.dtype.itemsize))
    for i in range(0, source.shape[0], rows):
        some = source.rows(i, min(i + rows, source.shape[0]))
        yield Chunk(some, dst[i : i + rows])
