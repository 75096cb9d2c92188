"""Staging: a step's arrays in one buffer, written on the host, copied to the device at once and read there in place.

The graph's inputs say which arrays exist. Host buffers alternate, so that one step can be written while the copy of the
step before is still to come. Of a large table, only the part that a batch fills is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphllm.program.expr import value
from graphllm.program.specs import InputSpec
from graphllm.runtime.memory.memory import Array, Memory

if TYPE_CHECKING:
    import torch

_ALIGN = 64
_SIZES_KEPT = 256  # padded sizes with remembered views
_WHOLE_TABLES = 1 << 17  # bytes of ragged inputs up to which one copy of all is the fastest


class StepInput(NamedTuple):
    """One ragged batch as host arrays.

    tokens: of all sequences.
    sequences: of the batch.
    rows: tokens that are sampled from.
    query_len: tokens of each sequence, where all have equally many and all are sampled from, else 0.
    arrays: by the names of the graph's inputs. An array may be shorter than the padded size; a missing one is neutral.
    `ForwardContext` explains the inputs of models, and the ops of the sampling programs explain the others. In
    ``token_ids``, -(slot + 1) stands for the token last sampled for that slot, on the device.
    num_drafts: drafts that a draft graph makes after the step, None for as many as can be verified.
    pad_to: least number of tokens to pad to, or of sequences where each has one token.
    num_independent: of the most recently started steps, how many produce nothing that this step reads, apart from what
    their layers write. In a pipeline, this step's layers may run before the rest of these steps.
    """

    tokens: int
    sequences: int
    rows: int
    query_len: int
    arrays: Mapping[str, np.ndarray]
    num_drafts: int | None = None
    pad_to: int = 0
    num_independent: int = 0


class Sampling(NamedTuple):
    """What the sampling of one step is given.

    mask [M, ceil(V / 32)] int32: rows for ``mask_row``.
    scores: whether any row wants logprobs.
    whole: rows that want logprobs of the whole vocabulary.
    hook: edits the float32 logits [R, V] in place, last before sampling.
    """

    mask: np.ndarray | None = None
    scores: bool = False
    whole: Sequence[int] = ()
    hook: Callable[[torch.Tensor], None] | None = None


class _Field(NamedTuple):
    offset: int
    bytes: int
    shape: list[int]
    dtype: str

    def of(self, buffer: np.ndarray) -> np.ndarray:
        """The field's view of a buffer of bytes."""
        return buffer[self.offset : self.offset + self.bytes].view(self.dtype).reshape(self.shape)


class _Layout(NamedTuple):
    """Where fields lie at some sizes.

    ragged, late: offsets at which inputs of that kind begin.
    neutral: the bytes before them, of a batch without sequences.
    """

    fields: dict[str, _Field]
    ragged: int
    late: int
    neutral: memoryview


class Staging:
    """The inputs of one graph.

    specs: in any order.
    limits: the largest T, S and R.
    buffers: buffers on the host, numbered from 0. The device has one buffer; it holds the inputs copied last.
    """

    def __init__(self, specs: list[InputSpec], limits: Mapping[str, int], memory: Memory, buffers: int = 2) -> None:
        self._specs = sorted(specs, key=lambda s: (s.late, s.ragged))
        self._ragged = [s.name for s in self._specs if s.ragged]
        self._extended = {s.name for s in self._specs if s.padding == "last"}
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._views: dict[tuple[int, ...], dict[str, np.ndarray]] = {}
        most = self._layout(limits)
        size = max((f.offset + -(-f.bytes // _ALIGN) * _ALIGN for f in most.fields.values()), default=1)
        self._memory = memory
        self._host = [memory.staging(size, on_host=True) for _ in range(buffers)]
        self._device = memory.staging(size, on_host=False)
        self._host_numbers = [t.numpy() for t in self._host]
        self._host_bytes = [numbers.data for numbers in self._host_numbers]
        self._device_bytes = self._device.numpy().data if memory.device.type == "cpu" else None
        self._filled: list[dict[str, tuple[int, int]]] = [{}] * buffers  # rows and columns of ragged inputs
        largest = max((most.fields[name].bytes for name in self._ragged), default=0)
        self._packed = memory.staging(largest if largest > _WHOLE_TABLES else 0, on_host=False)

    def _layout(self, sizes: Mapping[str, int]) -> _Layout:
        key = tuple(sizes.values())
        layout = self._layouts.get(key)
        if layout is None:
            fields: dict[str, _Field] = {}
            at = ragged = late = 0
            for spec in self._specs:
                shape = [value(d, sizes) for d in spec.shape]
                count = int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
                fields[spec.name] = _Field(at, count, shape, spec.dtype)
                at += -(-count // _ALIGN) * _ALIGN
                ragged = ragged if spec.ragged or spec.late else at
                late = late if spec.late else at
            if len(self._layouts) >= _SIZES_KEPT:
                self._layouts.clear()
                self._views.clear()
            neutral = np.zeros(ragged, dtype=np.uint8)
            for spec in self._specs:
                if spec.neutral and not (spec.ragged or spec.late):
                    fields[spec.name].of(neutral)[...] = spec.neutral
            layout = self._layouts[key] = _Layout(fields, ragged, late, neutral.data)
        return layout

    def tensors(self, sizes: Mapping[str, int]) -> dict[str, Array]:
        """The device views for a padded size, by the names of inputs in programs."""
        return {
            f"step.{name}": self._memory.shaped(self._device[f.offset : f.offset + f.bytes], f.dtype, f.shape)
            for name, f in self._layout(sizes).fields.items()
        }

    def _arrays(self, buffer: int, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        key = (buffer, *sizes.values())
        fields = self._layout(sizes).fields
        if key not in self._views:
            host = self._host_numbers[buffer]
            self._views[key] = {name: f.of(host) for name, f in fields.items()}
        return self._views[key]

    def fill(self, buffer: int, step: StepInput, sizes: Mapping[str, int]) -> None:
        """Write a batch, padded to ``sizes``, into a host buffer. Padding sequences own no tokens."""
        arrays, layout = self._arrays(buffer, sizes), self._layout(sizes)
        self._host_bytes[buffer][: len(layout.neutral)] = layout.neutral
        packed = layout.late - layout.ragged > _WHOLE_TABLES
        filled = self._filled[buffer] = {}
        given = step.arrays
        for name, array in arrays.items():
            values = given.get(name)
            if name in self._ragged:
                values = np.zeros_like(array) if values is None else values
                rows, columns = filled[name] = values.shape
                part = array.reshape(-1)[: rows * columns].reshape(rows, columns) if packed else array[:rows, :columns]
                part[:] = values
            elif values is None:
                continue
            elif values.ndim == 1:
                array[: len(values)] = values
            else:
                array[tuple(map(slice, values.shape))] = values
        for name in self._extended & given.keys():
            arrays[name][len(given[name]) :] = given[name][-1]

    def fill_late(self, buffer: int, name: str, values: np.ndarray, sizes: Mapping[str, int]) -> None:
        """Write the first rows of a late input."""
        self._arrays(buffer, sizes)[name][: len(values)] = values

    def upload(self, buffer: int, sizes: Mapping[str, int]) -> None:
        """Copy everything but late inputs to the device, in the order of the current stream."""
        layout = self._layout(sizes)
        if layout.late - layout.ragged <= _WHOLE_TABLES:
            self._copy(buffer, 0, layout.late)
            return
        self._copy(buffer, 0, layout.ragged)
        for name, (rows, columns) in self._filled[buffer].items():
            f = layout.fields[name]
            packed = self._packed[: rows * columns * 4]
            packed.copy_(self._host[buffer][f.offset : f.offset + len(packed)], non_blocking=True)
            table = self._memory.shaped(self._device[f.offset : f.offset + f.bytes], "int32", f.shape)
            table[:rows, :columns].copy_(self._memory.shaped(packed, "int32", (rows, columns)))

    def upload_late(self, buffer: int, name: str, rows: int, sizes: Mapping[str, int]) -> None:
        """Copy that many rows of a late input."""
        f = self._layout(sizes).fields[name]
        self._copy(buffer, f.offset, f.offset + rows * (f.bytes // f.shape[0]))

    def _copy(self, buffer: int, start: int, end: int) -> None:
        if self._device_bytes is None:
            self._device[start:end].copy_(self._host[buffer][start:end], non_blocking=True)
        else:  # torch would let another thread run Python, and then wait for it
            self._device_bytes[start:end] = self._host_bytes[buffer][start:end]


def ragged(new: Sequence[Sequence[int]], done: Sequence[int], tables: Sequence[np.ndarray] = ()) -> StepInput:
    """A batch without requests, for encoders, warm-up, tests and benchmarks. The last token of each sequence is sampled
    from.

    new: the tokens that each sequence runs.
    done: the number of tokens that each sequence has computed.
    tables: block tables [S, n] of each cache group.
    """
    counts = np.array([len(n) for n in new], dtype=np.int32)
    ends, starts = np.cumsum(counts, dtype=np.int32), np.array(done, dtype=np.int32)
    T = int(ends[-1])
    arrays = {
        "token_ids": np.concatenate([np.asarray(n, dtype=np.int32) for n in new]),
        "positions": np.arange(T, dtype=np.int32) + np.repeat(starts - (ends - counts), counts),
        "context_lens": np.repeat(starts + counts, counts),
        "logits_indices": ends - 1,
        "query_start_loc": np.concatenate([np.zeros(1, np.int32), ends]),
        "seq_lens": starts + counts,
        **{f"block_table.{g}": table for g, table in enumerate(tables)},
    }
    return StepInput(T, len(new), len(new), int(len(new) == T), arrays)


def stack_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables of unequal lengths as one [S, longest] int32 array, zero-padded."""
    width = max((len(t) for t in tables), default=1)
    out = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out
