"""The header of GGUF files: metadata and the table of tensors, of versions 2 and 3, little endian, and nothing else.

The format is ggml's (docs/gguf.md of github.com/ggml-org/ggml). Whoever reads it need not trust the file: every length
is compared with what is left of it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graphllm.config.fields import check_no_pointer
from graphllm.weights.checkpoint.tensor_info import WeightError

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")))
_STRING, _ARRAY = 8, 9
_MOST_DIMS, _DEEPEST = 4, 4  # dimensions of a tensor, arrays in arrays
_DAMAGED = "damaged; download it again"


class Blocks(NamedTuple):
    """A tensor type. entries, nbytes: of a block."""

    name: str
    entries: int
    nbytes: int


# By the number in the file. Those that cannot be read (the text says so) still tell their size.
TYPES = {
    0: Blocks("f32", 1, 4), 1: Blocks("f16", 1, 2), 2: Blocks("q4_0", 32, 18), 3: Blocks("q4_1", 32, 20),
    6: Blocks("q5_0", 32, 22), 7: Blocks("q5_1", 32, 24), 8: Blocks("q8_0", 32, 34), 10: Blocks("q2_k", 256, 84),
    11: Blocks("q3_k", 256, 110), 12: Blocks("q4_k", 256, 144), 13: Blocks("q5_k", 256, 176),
    14: Blocks("q6_k", 256, 210), 20: Blocks("iq4_nl", 32, 18), 23: Blocks("iq4_xs", 256, 136),
    30: Blocks("bf16", 1, 2), 39: Blocks("mxfp4", 32, 17),
}  # fmt: skip
_UNREAD = {
    9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 21: "iq3_s", 22: "iq2_s",
    24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 40: "nvfp4",
}  # fmt: skip


class Tensor(NamedTuple):
    """Where a tensor is: from ``offset`` (absolute) of ``file`` on. shape: the outermost dimension first."""

    file: Path
    kind: Blocks
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.entries * self.kind.nbytes


class Gguf(NamedTuple):
    """A file, or all files of a split one. metadata: of the first."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def files_of(file: Path) -> tuple[Path, ...]:
    """The file, or all files of the split one that it is the first of. Raises WeightError when one is missing."""
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return (file,)
    stem, number, count = split.groups()
    if int(number) != 1:
        raise WeightError(
            file, [f"is part {int(number)} of {int(count)}; name the first, {stem}-00001-of-{count}.gguf"]
        )
    files = tuple(file.with_name(f"{stem}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1))
    if missing := [f.name for f in files if not f.is_file()]:
        raise WeightError(file, [f"{name}, which belongs to it, is not there; download it" for name in missing[:8]])
    return files


def read_gguf(file: Path) -> Gguf:
    """The header of a file, or of all files of a split one. Raises WeightError when one is no good."""
    files = files_of(file)
    for part in files:
        check_no_pointer(part)
    parts = [_read(f) for f in files]
    metadata, tensors = parts[0][0], {name: t for _, found in parts for name, t in found.items()}
    expected = metadata.get("split.tensors.count", len(tensors))
    if sum(len(found) for _, found in parts) != len(tensors) or expected != len(tensors):
        raise WeightError(file, [f"its parts hold {len(tensors)} tensors, it says {expected}; download them again"])
    if (count := metadata.get("split.count", 1)) not in (0, len(files)):
        raise WeightError(file, [f"is one of {count} parts; give them the names NAME-00001-of-{count:05}.gguf"])
    return Gguf(files, metadata, tensors)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(file, data).read()
    except OSError as failure:
        raise WeightError(file, [f"cannot be read ({failure.strerror}); put the model's file there"]) from failure
    except ValueError as failure:  # an empty file has no memory map, a name is no UTF-8
        raise WeightError(file, [f"{_DAMAGED} ({failure})"]) from failure


class _Header:
    """Reads from the front to the back."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._size, self._at = file, data, len(data), 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if (magic := self._data[:4]) != b"GGUF":
            raise self._bad(f"not a GGUF file: it begins with {magic!r}; give another one")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            big = struct.pack("<I", version) in (b"\0\0\0\2", b"\0\0\0\3")
            what = "big endian" if big else f"of version {version}"
            raise self._bad(f"is {what}; versions 2 and 3, little endian, are read: convert the model again")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        table = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment is {alignment!r:.80}, which is no power of two: {_DAMAGED}")
        return metadata, self._placed(table, -(-self._at // alignment) * alignment, alignment)

    def _placed(self, table: list[tuple[str, Tensor]], base: int, alignment: int) -> dict[str, Tensor]:
        end, last = base, "the header"
        placed: dict[str, Tensor] = {}
        for name, tensor in sorted(table, key=lambda row: (row[1].offset, row[1].nbytes)):
            at = base + tensor.offset
            if name in placed:
                raise self._bad(f"tensor {name} is there twice: {_DAMAGED}")
            if tensor.offset % alignment:
                raise self._bad(f"tensor {name} begins at {tensor.offset}, no multiple of {alignment}: {_DAMAGED}")
            if at < end:
                raise self._bad(f"tensor {name} overlaps {last}: {_DAMAGED}")
            if at + tensor.nbytes > self._size:
                raise self._bad(
                    f"truncated: {self._size} bytes, tensor {name} ends at {at + tensor.nbytes}; download it again"
                )
            placed[name], end, last = tensor._replace(offset=at), at + tensor.nbytes, f"tensor {name}"
        return placed

    def _tensor(self) -> tuple[str, Tensor]:
        name, dims = self._string(), self._number("I")
        if not 1 <= dims <= _MOST_DIMS:
            raise self._bad(f"tensor {name!r:.80} has {dims} dimensions: {_DAMAGED}")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = TYPES.get(number)
        if kind is None:
            raise self._bad(
                f"tensor {name!r:.80} is of type {_UNREAD.get(number, number)}, which cannot be read; quantize the "
                f"model again, to one of {', '.join(t.name for t in TYPES.values())}"
            )
        if shape[-1] % kind.entries:
            raise self._bad(
                f"tensor {name!r:.80}: {shape[-1]} is no multiple of {kind.name}'s {kind.entries}: {_DAMAGED}"
            )
        return name, Tensor(self._file, kind, shape, offset)

    def _value(self, kind: int, deep: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and deep < _DEEPEST:
            inner, count = self._number("I"), self._number("Q")
            if code := _SCALARS.get(inner):
                return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))
            if count > self._size - self._at:
                raise self._short()
            return [self._value(inner, deep + 1) for _ in range(count)]
        if code := _SCALARS.get(kind):
            return self._number(code)
        raise self._bad(f"metadata of type {kind}, which is not known: {_DAMAGED}")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "surrogateescape")

    def _take(self, count: int) -> bytes:
        start = self._at
        if count > self._size - start:
            raise self._short()
        self._at = start + count
        return self._data[start : self._at]

    def _short(self) -> WeightError:
        return self._bad(f"truncated: {self._size} bytes, its header has more; download it again")

    def _bad(self, why: str) -> WeightError:
        return WeightError(self._file, [why])
