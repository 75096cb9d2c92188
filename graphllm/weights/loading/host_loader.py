"""Loads weights into a CPU's memory without torch: what checkpoints in GGUF, and plain ones that nothing rounds, need.

It knows the expressions that only move bytes, cast plain numbers, or put blocks of a GGUF file in the order in which
kernels read them, by a routine of the artifact's libraries. `host_loader` is for plans of nothing else; the general
loader (`graphllm.weights.loading.loader`) takes the others, and gives every error.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphllm.host.hugepages import zeros
from graphllm.host.libraries import Libraries
from graphllm.host.machine import usable_cores
from graphllm.ops.encodings.gguf_tiles import ROWS, TILED, Tiled
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.checkpoint.files import opened, read_into
from graphllm.weights.checkpoint.tensor_info import TensorInfo
from graphllm.weights.dtypes import BY_TAG, DTYPES, PLAIN
from graphllm.weights.loading.host_array import HostArray, bfloat16_bits
from graphllm.weights.loading.shared_work import Todo, run
from graphllm.weights.plan.expr import Concat, Decode, Each, Encode, Expr, Read, Values
from graphllm.weights.plan.plan import Entry, WeightPlan

_ALIGN = 64  # bytes: a cache line
_CHUNK = 1 << 20  # bytes read at once
_READERS = 4  # threads at most
_ADDED = {"+1": 1, "-1": -1}  # what functions of numbers add
_TILING = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
)


class _OtherError(Exception):
    """Something that only the general loader knows."""


@dataclass(frozen=True)
class _Job:
    """Some rows of a tensor of the checkpoint. put: gets their bytes; None where they are ``target``'s as they are."""

    info: TensorInfo
    start: int
    stop: int
    target: HostArray
    put: Callable[[np.ndarray, HostArray], None] | None

    @property
    def offset(self) -> int:
        return self.info.offset + self.start * _row_bytes(self.info)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * _row_bytes(self.info)

    def run(self, fd: int, stage: np.ndarray) -> None:
        """Read and put where it belongs. Raises WeightError when the file ends before it."""
        into = stage[: self.nbytes] if self.put is not None else self.target.numbers.reshape(-1).view(np.uint8)
        read_into(into.data[: self.nbytes], self.info.file, fd, self.offset)
        if self.put is not None:
            self.put(into, self.target)


_Fill = Callable[[HostArray], Iterator[_Job]]


class HostLoader:
    """Loads what a plan makes of a checkpoint. libraries: of the artifact's kernels. Use `host_loader`."""

    def __init__(self, plan: WeightPlan, checkpoint: Checkpoint, libraries: Libraries) -> None:
        self._plan, self._tensors = plan, checkpoint.tensors
        self._libraries = libraries
        self._unread = set(checkpoint.tensors)
        self._fills = {entry.name: self._fill(entry) for entry in plan if not entry.tie}
        if self._unread:
            raise _OtherError

    def load(self, into: Mapping[str, HostArray] | None = None) -> dict[str, HostArray]:
        """The finished parameters by name. Tied ones are the same array. into: memory to fill, zeros; None: it is
        allocated. Raises WeightError."""
        own = [e for e in self._plan if not e.tie]
        if into is None:
            sizes = (-(-HostArray.bytes_of(e.shape, e.dtype) // _ALIGN) * _ALIGN for e in own)
            starts = [0, *itertools.accumulate(sizes)]
            block = zeros(max(1, starts[-1]))
            into = {e.name: HostArray.of(block[at:], e.shape, e.dtype) for e, at in zip(own, starts, strict=False)}
        arrays = into
        jobs = [job for name, fill in self._fills.items() for job in fill(arrays[name])]
        _run(sorted(jobs, key=lambda job: (str(job.info.file), job.offset)))
        return {e.name: arrays[e.tie or e.name] for e in self._plan}

    def _fill(self, entry: Entry) -> _Fill:
        if isinstance(entry.expr, Values):
            return self._values(entry.expr, entry)
        if isinstance(entry.expr, Encode):
            return self._tiles(entry.expr, entry)
        parts = [self._part(part, entry.dtype) for part in _rows_of(entry.expr)]
        if any(entry.shape != (sum(i.shape[0] for i, _ in parts), *info.shape[1:]) for info, _ in parts):
            raise _OtherError

        def fill(array: HostArray) -> Iterator[_Job]:
            at = 0
            for info, cast in parts:
                for start, stop in _chunks(info, 1):
                    yield _Job(info, start, stop, array[at + start : at + stop], cast)
                at += info.shape[0]

        return fill

    def _part(self, expr: Expr, dtype: str) -> tuple[TensorInfo, Callable[[np.ndarray, HostArray], None] | None]:
        """A tensor, or what is by a constant more or less, and what puts its numbers in a parameter."""
        added = _ADDED.get(expr.function) if isinstance(expr, Each) else 0
        if added is None:
            raise _OtherError
        info = self._read(expr.part if isinstance(expr, Each) else expr)
        return info, _cast(info, dtype, added)

    def _values(self, expr: Values, entry: Entry) -> _Fill:
        if entry.dtype not in ("float32", "float64", "int32", "int64") or len(expr.values) != math.prod(entry.shape):
            raise _OtherError

        def fill(array: HostArray) -> Iterator[_Job]:
            array.numbers[...] = np.array(expr.values, np.float64).reshape(array.shape)
            yield from ()

        return fill

    def _tiles(self, expr: Encode, entry: Entry) -> _Fill:
        """Blocks of a GGUF file in the order in which kernels read them."""
        kind = expr.encoding.removeprefix("tiled_")
        routine: Any = self._libraries.find(f"graphllm_gguf_tiles_{kind}")
        if kind not in TILED or routine is None:
            raise _OtherError
        form, infos, heads = TILED[kind], list[TensorInfo](), list[int]()
        for part in _rows_of(expr.matrix):
            stored, _, head = part.encoding.partition("-") if isinstance(part, Decode) else ("", "", "")
            if not isinstance(part, Decode) or stored != f"gguf_{kind}":
                raise _OtherError
            if infos and infos[-1].shape[0] % ROWS:  # the next one begins within a tile
                raise _OtherError
            infos.append(self._read(part.parts[0]))
            heads.append(int(head or 1))
            if _row_bytes(infos[-1]) != entry.shape[1] * form.nbytes:
                raise _OtherError
        if entry.shape[0] != -(-sum(info.shape[0] for info in infos) // ROWS):
            raise _OtherError
        puts = [_tiling(form, routine, head) for head in heads]

        def fill(array: HostArray) -> Iterator[_Job]:
            at = 0
            for info, head, put in zip(infos, heads, puts, strict=True):
                for start, stop in _chunks(info, math.lcm(ROWS, head)):
                    yield _Job(info, start, stop, array[(at + start) // ROWS : -(-(at + stop) // ROWS)], put)
                at += info.shape[0]

        return fill

    def _read(self, expr: Expr) -> TensorInfo:
        """The tensor that an expression is, whole."""
        if not isinstance(expr, Read):
            raise _OtherError
        name = next((n for n in expr.sources if n in self._tensors), None)
        if name is None:
            raise _OtherError
        info = self._tensors[name]
        if info.shape != expr.stored or not info.shape or (expr.dtype and DTYPES[expr.dtype].tag != info.dtype):
            raise _OtherError
        self._unread.discard(name)
        return info


def host_loader(plan: WeightPlan, checkpoint: Checkpoint, libraries: Libraries) -> HostLoader | None:
    """What loads the plan without torch; None where that cannot be, such as for a checkpoint that does not fit it."""
    try:
        return HostLoader(plan, checkpoint, libraries)
    except (_OtherError, OSError):
        return None


def _rows_of(expr: Expr) -> tuple[Expr, ...]:
    """The parts one below the other that a matrix or a vector is made of."""
    return expr.parts if isinstance(expr, Concat) and expr.dim == 0 else (expr,)


def _row_bytes(info: TensorInfo) -> int:
    return info.nbytes // max(1, info.shape[0])


def _chunks(info: TensorInfo, unit: int) -> Iterator[tuple[int, int]]:
    """Rows to be read at once, from and to: whole units."""
    rows, step = info.shape[0], max(1, _CHUNK // max(1, _row_bytes(info)) // unit) * unit
    return ((at, min(at + step, rows)) for at in range(0, rows, step))


def _cast(info: TensorInfo, dtype: str, added: int = 0) -> Callable[[np.ndarray, HostArray], None] | None:
    """What makes numbers of that dtype of a tensor's bytes, ``added`` more; None where they are that. Raises
    _OtherError."""
    stored = BY_TAG[info.dtype].name if info.dtype in BY_TAG else ""
    if stored == dtype and not added:
        return None
    if stored not in PLAIN or dtype not in ("bfloat16", "float16", "float32"):
        raise _OtherError

    def put(data: np.ndarray, target: HostArray) -> None:
        given = HostArray.of(data, target.shape, stored)
        numbers = given.numbers if stored == "float64" else given.floats()
        if added:  # in float64 on the way, as `Each` is evaluated
            numbers = (numbers.astype(np.float64) + added).astype(np.float32)
        if dtype == "bfloat16":
            target.numbers[...] = bfloat16_bits(numbers.astype(np.float32))
        else:
            target.numbers[...] = numbers

    return put


def _tiling(form: Tiled, routine: Any, head: int) -> Callable[[np.ndarray, HostArray], None]:
    """What puts rows of blocks in tiles. routine: of the library, see `make_tiles` in ops/gemm/gguf_linear. head: rows
    that are interleaved in the file, see `graphllm.weights.formats.gguf`."""
    fields = (ctypes.c_int64 * (3 * len(form.fields)))(*(int(n) for field in form.fields for n in field))
    count, call = len(form.fields), _TILING(ctypes.cast(routine, ctypes.c_void_p).value or 0)

    def put(data: np.ndarray, target: HostArray) -> None:
        width = target.shape[1]
        rows = len(data) // (width * form.nbytes)
        if head > 1:
            halves = data.reshape(rows // head, head // 2, 2, -1)
            data = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)
        call(data.ctypes.data, target.data_ptr(), rows, width, fields, count)

    return put


def _run(jobs: Sequence[_Job]) -> None:
    """Run all jobs, in several threads."""
    todo, size = Todo(jobs), max((job.nbytes for job in jobs), default=0)
    with opened({job.info.file for job in jobs}) as fds:

        def work() -> None:
            stage = np.empty(size, np.uint8)
            for job in todo:
                job.run(fds[job.info.file], stage)

        run(work, min(_READERS, usable_cores()), todo)
