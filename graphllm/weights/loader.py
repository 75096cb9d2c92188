"""Executes a weight plan: streams a checkpoint into finished parameters, or makes random ones for benchmarks.

Bytes go from the file straight into the parameter's memory where they can stay as they are; what must be cast or
transposed goes through a small staging buffer. So the peak of resident memory is the model and those buffers. There is
no memory map: its pages would count as resident memory and arrive one fault at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphllm.hugepages import zeros
from graphllm.weights.checkpoint import Checkpoint, TensorInfo, WeightError
from graphllm.weights.formats import BLOCK, FORMATS, Format
from graphllm.weights.plan import Entry, Made, Quantize, Read, Tie, Values, WeightPlan
from graphllm.weights.quantize import Packer

Progress = Callable[[int, int], None]

_CHUNK = 16 << 20  # one read; also a slot of pinned memory
_STAGE = 1 << 20  # one read to be cast on the CPU: stays in a core's cache until it is cast
_GRAIN = 32767  # numbers; torch splits larger elementwise work among its threads
_ALIGN = 64  # bytes: a cache line
_READERS = 4  # threads; on a warm page cache they share the copying and the page faults of fresh memory
_SLOTS = 2  # pinned slots of a reader: one is read into while the other is copied to the device
# A CPU draws only some 50 million normal numbers a second: random weights there repeat one block of them, each tensor
# from a start of its own. The length is prime, so that the rows of a matrix all differ.
_BLOCK = 1_048_573
_SHIFTS = 1 << 14

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}

# Left in checkpoints by older transformers versions; constants that are computed, not parameters.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention)\.(bias|masked_bias)|position_ids)$"
)
_TIED = "lm_head.weight"  # saved by some although it is tied


def load_weights(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    kernels: Path | None = None,
) -> dict[str, Tensor]:
    """The finished parameters by name, on ``device``. Tied ones are the same tensor.

    kernels: the artifact's library, which makes quantizing fast; see `Packer`. progress(done, total): bytes read so
    far; called from reader threads, one call at a time. Raises WeightError before anything big is allocated, naming
    everything about the checkpoint that does not fit the plan.
    """
    device = torch.device(device)
    pieces = _match(plan, checkpoint)
    tensors = _allocate(plan, device)
    counter = _Counter(sum(p.nbytes for p in pieces), progress)
    with contextlib.ExitStack() as stack:
        fds = {f: _open(f, stack) for f in {p.info.file for p in pieces}}
        packer = Packer(kernels)
        chunks = [c for p in pieces for c in _chunks(p, tensors, fds[p.info.file], packer)]
        _read(chunks, device, counter)
    return tensors


def read_tensors(file: Path, tensors: Mapping[int, Tensor], progress: Progress | None = None) -> None:
    """Fill contiguous tensors of one device with the bytes of a file that begin at their keys. progress: see
    `load_weights`."""
    counter = _Counter(sum(t.nbytes for t in tensors.values()), progress)
    with contextlib.ExitStack() as stack:
        fd = _open(file, stack)
        chunks = [
            _Chunk(file, fd, at + i * _CHUNK, part.nbytes, part.dtype, part)
            for at, tensor in sorted(tensors.items())
            for i, part in enumerate(tensor.view(-1).split(_CHUNK // tensor.itemsize))
            if part.nbytes
        ]
        device = next(iter(tensors.values())).device
        _read(chunks, device, counter)


def random_weights(
    plan: WeightPlan, device: str | torch.device = "cpu", seed: int = 0, kernels: Path | None = None
) -> dict[str, Tensor]:
    """Parameters for benchmarks: normal with deviation 0.02, norms are ones, computed ones are what the plan says.

    kernels: see `load_weights`.
    """
    device, packer = torch.device(device), Packer(kernels)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = _allocate(plan, device)
    on_cpu = device.type == "cpu"
    noise = torch.empty(_BLOCK + _SHIFTS if on_cpu else 0, device=device).normal_(0.0, 0.02, generator=generator)
    for e in plan:
        tensor = tensors[e.name]
        if not isinstance(e.steps[0], Read):
            continue
        if e.quantize:
            start = int(torch.randint(_SHIFTS, (), generator=generator)) if on_cpu else 0
            _fill_packed(e.quantize, tensors, e.name, noise[start:], generator, packer)
            continue
        if len(e.shape) == 1 and "norm" in e.name and "bias" not in e.name:
            tensor.fill_(1.0)
        elif on_cpu:
            start = int(torch.randint(_SHIFTS, (), generator=generator))
            for part in tensor.view(-1).split(_BLOCK):
                part.copy_(noise[start : start + len(part)])
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
    return tensors


def _fill_packed(
    step: Quantize,
    tensors: dict[str, Tensor],
    name: str,
    noise: Tensor,
    generator: torch.Generator,
    packer: Packer,
) -> None:
    """The first rows are random, at most as many as there is ``noise`` for, and the others repeat them."""
    values, scales, (rows, inner) = tensors[name], tensors[step.scales], step.shape
    some = min(rows, max(1, _BLOCK // inner // BLOCK) * BLOCK)
    if values.device.type == "cpu" and some * inner <= len(noise):
        numbers = noise[: some * inner].view(some, inner)
    else:
        numbers = torch.empty(some, inner, device=values.device).normal_(0.0, 0.02, generator=generator)
    packer.pack(numbers, FORMATS[step.format], values, scales)
    for whole in (values, scales):
        first, *others = whole.split(-(-some // BLOCK))
        for part in others:
            part.copy_(first[: len(part)])


@dataclass(frozen=True)
class _Piece:
    """One read of the plan with the checkpoint tensor that it found."""

    entry: Entry
    read: Read
    info: TensorInfo

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.info.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.read.shape) * self.dtype.itemsize

    @property
    def offset(self) -> int:
        """Where its bytes start in the file."""
        if self.read.rows is None:
            return self.info.offset
        return self.info.offset + self.read.rows[0] * (self.nbytes // self.read.shape[0])


def _match(plan: WeightPlan, checkpoint: Checkpoint) -> list[_Piece]:
    """Each read with its tensor, in file order. Raises WeightError for all problems at once."""
    pieces: list[_Piece] = []
    problems: list[tuple[str, str]] = []
    known: set[str] = set()
    for e in plan:
        for s in e.steps:
            if isinstance(s, Read):
                known.update(s.source)
                name = next((n for n in s.source if n in checkpoint.tensors), None)
                if name is None:
                    problems.append((" or ".join(s.source), "missing"))
                    continue
                info = checkpoint.tensors[name]
                if problem := _misfit(s, info):
                    problems.append((name, problem))
                else:
                    pieces.append(_Piece(e, s, info))
            elif not isinstance(s, (Values, Tie, Quantize, Made)):
                problems.append((e.name, f"step {s.op!r} is not known to this loader"))
    tied = any(e.tie for e in plan) or len({p.read.key for p in pieces}) < len(pieces)
    for name in checkpoint.tensors:
        if name not in known and not _BUFFERS.search(name) and not (tied and name == _TIED):
            problems.append((name, "not used by the model; is the config.json of another one?"))
    if problems:
        raise WeightError(checkpoint.folder, _grouped(problems))
    return sorted(pieces, key=lambda p: (p.info.file, p.offset))


def _misfit(read: Read, info: TensorInfo) -> str | None:
    if info.dtype not in _DTYPES:
        return f"dtype {info.dtype} is not supported; use a checkpoint in {', '.join(_DTYPES)}"
    if read.rows is None:
        return None if info.shape == read.shape else f"shape {info.shape}, the model needs {read.shape}"
    if info.shape[1:] != read.shape[1:] or info.shape[:1] < read.rows[1:]:
        return f"shape {info.shape}, the model needs rows {read.rows[0]} to {read.rows[1]} of {('*', *read.shape[1:])}"
    return None


def _grouped(problems: list[tuple[str, str]]) -> list[str]:
    """One line each, but many names that differ only in numbers, such as the layer's, share one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, problem in problems:
        groups.setdefault((re.sub(r"\d+", "*", name), problem), []).append(name)
    lines = []
    for (pattern, problem), names in groups.items():
        many = len(names) > 8
        lines.append(f"{pattern} ({len(names)} tensors, first {names[0]})" if many else ", ".join(names))
        lines[-1] += f": {problem}"
    return lines


def _allocate(plan: WeightPlan, device: torch.device) -> dict[str, Tensor]:
    """Memory for every parameter (64-byte aligned), filled where its values are in the plan."""
    own = [e for e in plan if not e.tie]
    if device.type == "cpu":
        tensors = _in_one_block(own)
    else:
        # What pads packed integers and their scales is never written.
        padded = {e.name for e in own if e.quantize or isinstance(e.steps[0], Made)}
        tensors = {
            e.name: (torch.zeros if e.name in padded else torch.empty)(
                e.shape, dtype=getattr(torch, e.dtype), device=device
            )
            for e in own
        }
    for e in own:
        if isinstance(first := e.steps[0], Values):
            tensors[e.name].copy_(torch.tensor(first.values, dtype=torch.float64).view(e.shape))
    return {e.name: tensors[e.tie or e.name] for e in plan}


def _in_one_block(entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Zeros for them, one behind the other, so that few pages hold them."""
    starts = [0, *itertools.accumulate(-(-e.nbytes // _ALIGN) * _ALIGN for e in entries)]
    block = torch.from_numpy(zeros(max(1, starts[-1])))
    return {
        e.name: block[at : at + e.nbytes].view(getattr(torch, e.dtype)).view(e.shape)
        for e, at in zip(entries, starts[:-1], strict=True)
    }


@dataclass(frozen=True)
class _Chunk:
    """One read: ``nbytes`` at ``offset`` of an open file are ``dst`` in row-major order, as numbers of ``dtype``."""

    file: Path
    fd: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    dst: Tensor

    @property
    def direct(self) -> bool:
        """The bytes are the parameter's as they stand."""
        return self.dst.dtype == self.dtype and self.dst.is_contiguous()

    def put(self, numbers: Tensor) -> None:
        """Finish what was read, on the parameter's device."""
        if self.dst.is_cuda:
            self.dst.copy_(numbers, non_blocking=True)
        else:
            _copy_serially(self.dst, numbers)

    def read(self, into: Tensor) -> Tensor:
        """The numbers, read into the bytes of ``into`` and shaped as ``dst``."""
        buffer = into[: self.nbytes].numpy().data
        done = 0
        while done < self.nbytes:
            n = os.preadv(self.fd, [buffer[done:]], self.offset + done)
            if n == 0:
                raise WeightError(self.file, ["ends too early: the file has changed since it was opened"])
            done += n
        return into[: self.nbytes].view(self.dtype).view(self.dst.shape)


@dataclass(frozen=True)
class _Packed(_Chunk):
    """A read that is quantized: ``dst`` is a shape without memory. row, inner: where the first number belongs in the
    packed matrix of ``values`` and ``scales``. transpose: the checkpoint stores columns."""

    format: Format
    values: Tensor
    scales: Tensor
    row: int
    inner: int
    transpose: bool
    packer: Packer

    @property
    def direct(self) -> bool:
        return False

    def put(self, numbers: Tensor) -> None:
        rows = numbers.T if self.transpose else numbers
        self.packer.pack(rows, self.format, self.values, self.scales, self.row, self.inner)


def _packed_chunks(
    piece: _Piece, step: Quantize, tensors: dict[str, Tensor], fd: int, packer: Packer
) -> Iterator[_Chunk]:
    """Reads of whole blocks of rows; of whole groups of inner entries where the checkpoint stores columns."""
    read, fmt = piece.read, FORMATS[step.format]
    row_bytes = piece.nbytes // read.shape[0]
    unit = fmt.group if read.transpose else BLOCK
    rows = max(1, _STAGE // row_bytes // unit) * unit
    for i in range(0, read.shape[0], rows):
        shape = (min(rows, read.shape[0] - i), *read.shape[1:])
        yield _Packed(
            piece.info.file, fd, piece.offset + i * row_bytes, shape[0] * row_bytes, piece.dtype,
            torch.empty(shape, device="meta"), fmt, tensors[piece.entry.name], tensors[step.scales],
            read.row + (0 if read.transpose else i), i if read.transpose else 0, read.transpose, packer,
        )  # fmt: skip


def _chunks(piece: _Piece, tensors: dict[str, Tensor], fd: int, packer: Packer) -> Iterator[_Chunk]:
    """The reads of one piece, each of whole rows of it as the checkpoint stores it."""
    if piece.nbytes == 0:
        return
    if piece.entry.quantize:
        yield from _packed_chunks(piece, piece.entry.quantize, tensors, fd, packer)
        return
    read, tensor = piece.read, tensors[piece.entry.name]
    dst = tensor.view(-1)[read.offset : read.offset + math.prod(read.shape)]
    if read.transpose:
        dst = dst.view(read.shape[1], read.shape[0]).T
    row_bytes = piece.nbytes // len(dst)
    staged = tensor.device.type == "cpu" and (read.transpose or piece.dtype != tensor.dtype)
    rows = max(1, (_STAGE if staged else _CHUNK) // row_bytes)
    for i, part in enumerate(dst.split(rows)):
        at = piece.offset + i * rows * row_bytes
        yield _Chunk(piece.info.file, fd, at, len(part) * row_bytes, piece.dtype, part)


class _Counter:
    """Adds up what was read and reports it, from any thread."""

    def __init__(self, total: int, report: Progress | None) -> None:
        self._total, self._report, self._done = total, report, 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._report is not None:
                self._report(self._done, self._total)


class _Todo:
    """The chunks, handed out in file order to whichever reader asks; none any more once one has failed."""

    def __init__(self, chunks: list[_Chunk]) -> None:
        self._chunks, self._lock = iter(chunks), threading.Lock()

    def __iter__(self) -> Iterator[_Chunk]:
        while True:
            with self._lock:
                chunk = next(self._chunks, None)
            if chunk is None:
                return
            yield chunk

    def stop(self) -> None:
        with self._lock:
            self._chunks = iter(())


def _read(chunks: list[_Chunk], device: torch.device, counter: _Counter) -> None:
    if device.type == "cuda":
        _read_to_cuda(chunks, device, counter)
    else:
        _read_on_cpu(chunks, counter)


def _read_on_cpu(chunks: list[_Chunk], counter: _Counter) -> None:
    todo = _Todo(chunks)
    size = max((c.nbytes for c in chunks if not c.direct), default=0)

    def fill() -> None:
        stage = torch.empty(size, dtype=torch.uint8)
        for chunk in todo:
            if chunk.direct:
                chunk.read(into=chunk.dst.view(-1).view(torch.uint8))
            else:
                chunk.put(chunk.read(into=stage))
            counter.add(chunk.nbytes)

    _run(fill, min(_READERS, len(os.sched_getaffinity(0))), todo)


def _copy_serially(dst: Tensor, src: Tensor) -> None:
    """A copy in parts too small for torch to split among its threads: they would spin against the other readers."""
    rows = max(1, _GRAIN // math.prod(dst.shape[1:]))
    for part, numbers in zip(dst.split(rows), src.split(rows), strict=True):
        part.copy_(numbers)


def _read_to_cuda(chunks: list[_Chunk], device: torch.device, counter: _Counter) -> None:
    """Each reader has a stream of its own and pinned slots: it reads into one while the other is being copied."""
    todo = _Todo(chunks)
    size = max((c.nbytes for c in chunks), default=0)

    def fill() -> None:
        stream = torch.cuda.Stream(device)
        slots = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(_SLOTS)]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for i, chunk in enumerate(todo):
                slot, copied = slots[i % _SLOTS]
                copied.synchronize()  # returns at once for an event that was never recorded
                numbers = chunk.read(into=slot)
                # Cast and transpose on the device: a copy that does both from the host would do them on the CPU.
                chunk.put(numbers if chunk.direct else numbers.to(device, non_blocking=True))
                copied.record(stream)
                counter.add(chunk.nbytes)
        stream.synchronize()

    torch.cuda.synchronize(device)  # the parameters' memory may have been in use on another stream until now
    _run(fill, _READERS, todo)


def _run(reader: Callable[[], None], threads: int, todo: _Todo) -> None:
    """Run the reader in so many threads. When one fails, the others stop and its error is raised."""

    def work() -> None:
        try:
            reader()
        except BaseException:
            todo.stop()
            raise

    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(work) for _ in range(threads)]:
                future.result()
        finally:
            todo.stop()  # an interrupt of this thread ends them too


def _open(file: Path, stack: contextlib.ExitStack) -> int:
    fd = os.open(file, os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd
