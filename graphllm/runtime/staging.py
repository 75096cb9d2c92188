"""Staging: a step's arrays in one buffer, written on the host, copied to the device at once and read there in place.

Two host buffers take turns, so that one step can be written while the copy of the one before it is still to come. Large
block tables, of many sequences that may be long, are copied only as far as the batch fills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from graphllm.expr import value

_ALIGN = 64
_SIZES_KEPT = 256  # padded sizes whose views are remembered
_TABLE, _MASK = "step.block_table.", "step.mask"
_WHOLE_TABLES = 1 << 17  # bytes of block tables up to which one copy of all is the fastest


class StepInput(NamedTuple):
    """One ragged batch as host arrays: n sequences with T tokens, of which R rows are sampled from.

    `graphllm.ir.model.Step` says what the fields of the model mean, the ops of the sampling program the others.
    token_ids [T]: a negative -(slot + 1) takes the token last sampled for that slot, on the device. positions,
    context_len [T]. logits_indices [R]: rows of the batch. query_start_loc [n + 1], seq_lens [n],
    block_table [groups, n, width]; every sequence has a token. query_len: above 1 each sequence has so many tokens, its
    newest and drafts. pending [n] bool: of those the step in flight rejects drafts, by which positions and lengths are
    too high; None: of none. All other fields are [R], one entry for each sampled
    row; None is the neutral value throughout.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    context_len: np.ndarray
    logits_indices: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot: np.ndarray | None = None
    temperature: np.ndarray | None = None
    top_k: np.ndarray | None = None
    top_p: np.ndarray | None = None
    min_p: np.ndarray | None = None
    seed: np.ndarray | None = None
    draw: np.ndarray | None = None
    counted: np.ndarray | None = None
    mask_row: np.ndarray | None = None
    bias_count: np.ndarray | None = None
    repetition: np.ndarray | None = None
    frequency: np.ndarray | None = None
    presence: np.ndarray | None = None
    target: np.ndarray | None = None
    wanted: np.ndarray | None = None
    pending: np.ndarray | None = None
    query_len: int = 1


# What a row without a request, or a request without that wish, has; 0 where nothing is said.
_NEUTRAL = {"top_p": 1.0, "repetition": 1.0, "mask_row": -1, "target": -1, "wanted": -1}


class _Field(NamedTuple):
    offset: int
    bytes: int
    shape: list[int]
    dtype: str

    def of(self, buffer: np.ndarray) -> np.ndarray:
        """The field's view of a buffer of bytes."""
        return buffer[self.offset : self.offset + self.bytes].view(self.dtype).reshape(self.shape)


class _Layout(NamedTuple):
    """Where fields lie at some T and S. neutral: the bytes before the block tables, of a batch without sequences."""

    fields: dict[str, _Field]
    neutral: memoryview


class Staging:
    """The step's inputs.

    specs: dtype, shape over T and S, and strides of every field. limits: the largest T and S. slots:
    requests that may run; the slot of that number is scrap. ``rings`` host buffers, numbered from 0.
    """

    rings = 2

    def __init__(self, specs: Mapping[str, Any], limits: Mapping[str, int], slots: int, device: torch.device) -> None:
        order = sorted(specs, key=lambda name: (name == _MASK, name.startswith(_TABLE)))
        self._specs, self._slots = {name: specs[name] for name in order}, slots
        self._tables = [name for name in order if name.startswith(_TABLE)]
        self._layouts: dict[tuple[int, int], _Layout] = {}
        self._views: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}
        most = self._layout(limits["T"], limits["S"]).fields
        size = most[_MASK].offset + most[_MASK].bytes
        pin = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=pin) for _ in range(self.rings)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_bytes = [t.numpy().data for t in self._host]
        self._device_bytes = None if pin else self._device.numpy().data
        self._filled = [(0, 0)] * self.rings  # rows and columns of the block tables
        largest = max(most[name].bytes for name in self._tables)
        self._packed = torch.empty(largest if largest > _WHOLE_TABLES else 0, dtype=torch.uint8, device=device)

    def _layout(self, T: int, S: int) -> _Layout:
        layout = self._layouts.get((T, S))
        if layout is None:
            fields: dict[str, _Field] = {}
            at = 0
            for name, (dtype, shape, _) in self._specs.items():
                sizes = [value(d, {"T": T, "S": S}) for d in shape]
                count = int(np.prod(sizes)) * np.dtype(dtype).itemsize
                fields[name] = _Field(at, count, sizes, dtype)
                at += -(-count // _ALIGN) * _ALIGN
            if len(self._layouts) >= _SIZES_KEPT:
                self._layouts.clear()
                self._views.clear()
            neutral = np.zeros(fields[self._tables[0]].offset, dtype=np.uint8)
            for name, empty in {**_NEUTRAL, "slot": self._slots}.items():
                fields[f"step.{name}"].of(neutral)[:] = empty
            layout = self._layouts[T, S] = _Layout(fields, neutral.data)
        return layout

    def tensors(self, T: int, S: int) -> dict[str, torch.Tensor]:
        """The device views for a padded size."""
        return {
            name: self._device[f.offset : f.offset + f.bytes].view(getattr(torch, f.dtype)).view(f.shape)
            for name, f in self._layout(T, S).fields.items()
        }

    def _arrays(self, ring: int, T: int, S: int) -> dict[str, np.ndarray]:
        key = (ring, T, S)
        fields = self._layout(T, S).fields
        if key not in self._views:
            buffer = self._host[ring].numpy()
            self._views[key] = {name.removeprefix("step."): f.of(buffer) for name, f in fields.items()}
        return self._views[key]

    def fill(self, ring: int, step: StepInput, T: int, S: int) -> None:
        """Write a batch, padded to T and S, into a host buffer. Padding sequences own no tokens."""
        arrays = self._arrays(ring, T, S)
        neutral = self._layout(T, S).neutral
        self._host_bytes[ring][: len(neutral)] = neutral
        for name, values in zip(step._fields, step, strict=True):
            if name in arrays and isinstance(values, np.ndarray):
                arrays[name][: len(values)] = values
        arrays["query_start_loc"][len(step.query_start_loc) :] = step.query_start_loc[-1]
        rows, columns = self._filled[ring] = step.block_table.shape[1:]
        packed = self._table_bytes(T, S) > _WHOLE_TABLES
        for name, table in zip(self._tables, step.block_table, strict=True):
            field = arrays[name.removeprefix("step.")]
            part = field.reshape(-1)[: rows * columns].reshape(rows, columns) if packed else field[:rows, :columns]
            part[:] = table

    def fill_mask(self, ring: int, mask: np.ndarray, T: int, S: int) -> None:
        """Write the mask's rows [M, ceil(V / 32)] int32, M at most S."""
        self._arrays(ring, T, S)["mask"][: len(mask)] = mask

    def upload(self, ring: int, T: int, S: int) -> None:
        """Copy everything but the mask to the device, in the order of the current stream."""
        fields = self._layout(T, S).fields
        size = self._table_bytes(T, S)
        if size <= _WHOLE_TABLES:
            self._copy(ring, 0, fields[_MASK].offset)
            return
        self._copy(ring, 0, fields[_MASK].offset - size)
        rows, columns = self._filled[ring]
        packed = self._packed[: rows * columns * 4]
        for f in (fields[name] for name in self._tables):
            packed.copy_(self._host[ring][f.offset : f.offset + len(packed)], non_blocking=True)
            table = self._device[f.offset : f.offset + f.bytes].view(torch.int32).view(f.shape)
            table[:rows, :columns].copy_(packed.view(torch.int32).view(rows, columns))

    def _table_bytes(self, T: int, S: int) -> int:
        """What the block tables take of the buffer; they end where the mask begins."""
        fields = self._layout(T, S).fields
        return fields[_MASK].offset - fields[self._tables[0]].offset

    def upload_mask(self, ring: int, rows: int, T: int, S: int) -> None:
        """Copy that many rows of the mask."""
        field = self._layout(T, S).fields[_MASK]
        self._copy(ring, field.offset, field.offset + rows * 4 * field.shape[1])

    def _copy(self, ring: int, start: int, end: int) -> None:
        if self._device_bytes is None:
            self._device[start:end].copy_(self._host[ring][start:end], non_blocking=True)
        else:  # torch would let another thread run Python meanwhile, and then wait for it
            self._device_bytes[start:end] = self._host_bytes[ring][start:end]


def stack_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables of unequal lengths as one [S, longest] int32 array, zero-padded."""
    width = max((len(t) for t in tables), default=1)
    out = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out
