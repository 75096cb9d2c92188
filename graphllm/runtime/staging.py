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
    context_len [T]. logit_rows [R]: rows of the batch. query_start [n + 1], seq_len [n], block_table [groups, n,
    width]. All further fields are [R], one entry for each sampled row; None is the neutral value throughout.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    context_len: np.ndarray
    logit_rows: np.ndarray
    query_start: np.ndarray
    seq_len: np.ndarray
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


# What a row without a request, or a request without that wish, has; 0 where nothing is said.
_NEUTRAL = {"top_p": 1.0, "repetition": 1.0, "mask_row": -1, "target": -1, "wanted": -1}


class _Field(NamedTuple):
    offset: int
    bytes: int
    shape: list[int]
    dtype: str


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
        self._layouts: dict[tuple[int, int], dict[str, _Field]] = {}
        self._views: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}
        most = self._layout(limits["T"], limits["S"])
        size = most[_MASK].offset + most[_MASK].bytes
        pin = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=pin) for _ in range(self.rings)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        # On a CPU, plain bytes: a torch copy, which lets another thread run Python, would have to wait to go on.
        self._bytes = None if pin else [memoryview(t.numpy()) for t in (self._device, *self._host)]
        self._filled = [(0, 0)] * self.rings  # rows and columns of the block tables
        largest = max(most[name].bytes for name in self._tables)
        self._packed = torch.empty(largest if largest > _WHOLE_TABLES else 0, dtype=torch.uint8, device=device)

    def _layout(self, T: int, S: int) -> dict[str, _Field]:
        fields = self._layouts.get((T, S))
        if fields is None:
            fields, at = {}, 0
            for name, (dtype, shape, _) in self._specs.items():
                sizes = [value(d, {"T": T, "S": S}) for d in shape]
                count = int(np.prod(sizes)) * np.dtype(dtype).itemsize
                fields[name] = _Field(at, count, sizes, dtype)
                at += -(-count // _ALIGN) * _ALIGN
            if len(self._layouts) >= _SIZES_KEPT:
                self._layouts.clear()
                self._views.clear()
            self._layouts[T, S] = fields
        return fields

    def tensors(self, T: int, S: int) -> dict[str, torch.Tensor]:
        """The device views for a padded size."""
        return {
            name: self._device[f.offset : f.offset + f.bytes].view(getattr(torch, f.dtype)).view(f.shape)
            for name, f in self._layout(T, S).items()
        }

    def _arrays(self, ring: int, T: int, S: int) -> dict[str, np.ndarray]:
        key = (ring, T, S)
        fields = self._layout(T, S)
        if key not in self._views:
            buffer = self._host[ring].numpy()
            self._views[key] = {
                name.removeprefix("step."): buffer[f.offset : f.offset + f.bytes].view(f.dtype).reshape(f.shape)
                for name, f in fields.items()
            }
        return self._views[key]

    def fill(self, ring: int, step: StepInput, T: int, S: int) -> None:
        """Write a batch, padded to T and S, into a host buffer. Padding sequences own no tokens."""
        given: dict[str, Any] = step._asdict()
        tables = given.pop("block_table")
        rows, columns = self._filled[ring] = tables.shape[1:]
        packed = self._table_bytes(T, S) > _WHOLE_TABLES
        if given["slot"] is None:
            given["slot"] = np.empty(0, dtype=np.int32)
        for name, field in self._arrays(ring, T, S).items():
            if name == "mask":
                continue
            if name.startswith("block_table."):
                part = field.reshape(-1)[: rows * columns].reshape(rows, columns) if packed else field[:rows, :columns]
                part[:] = tables[int(name[12:])]
                continue
            values = given[name]
            count = 0 if values is None else len(values)
            if count:
                field[:count] = values
            if count < len(field):
                if name == "query_start":
                    field[count:] = values[-1]
                else:
                    field[count:] = self._slots if name == "slot" else _NEUTRAL.get(name, 0)

    def fill_mask(self, ring: int, mask: np.ndarray, T: int, S: int) -> None:
        """Write the mask's rows [M, ceil(V / 32)] int32, M at most S."""
        self._arrays(ring, T, S)["mask"][: len(mask)] = mask

    def upload(self, ring: int, T: int, S: int) -> None:
        """Copy everything but the mask to the device, in the order of the current stream."""
        fields = self._layout(T, S)
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
        fields = self._layout(T, S)
        return fields[_MASK].offset - fields[self._tables[0]].offset

    def upload_mask(self, ring: int, rows: int, T: int, S: int) -> None:
        """Copy that many rows of the mask."""
        field = self._layout(T, S)[_MASK]
        self._copy(ring, field.offset, field.offset + rows * 4 * field.shape[1])

    def _copy(self, ring: int, start: int, end: int) -> None:
        if self._bytes is None:
            self._device[start:end].copy_(self._host[ring][start:end], non_blocking=True)
        else:
            self._bytes[0][start:end] = self._bytes[1 + ring][start:end]


def stack_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables of unequal lengths as one [S, longest] int32 array, zero-padded."""
    width = max((len(t) for t in tables), default=1)
    out = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out
