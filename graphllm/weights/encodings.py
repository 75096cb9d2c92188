"""Encodings: ways to keep a matrix in other tensors than its numbers, such as integers and scales. Data and two pure
functions each; the registry. No torch.

`register_encoding` in any file, also of another package (an entry point of the group ``graphllm.plugins``), makes one
known to checkpoints, to the weight plan and to the pass that chooses the op; docs/adding-a-weight-encoding.md shows
how.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.host.libraries import Libraries
from graphllm.host.machine import PLUGIN_GROUP
from graphllm.weights.dtypes import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

Decoder = Callable[[Mapping[str, "Tensor"], int, int], "Tensor"]
Encoder = Callable[["Tensor"], Mapping[str, "Tensor"]]
Packer = Callable[["Tensor", Mapping[str, "Tensor"], int, int, Libraries | None], None]
Repacker = Callable[[Mapping[str, "Tensor"], int, int, Libraries | None], Mapping[str, "Tensor"]]


class Part(NamedTuple):
    """One tensor of an encoding.

    shape: of the part, for a matrix [rows, inner]. stored: its name in a checkpoint; ``{source}`` is the name that the
    model file gives, ``{stem}`` that name without what follows the last dot.
    """

    name: str
    dtype: str
    shape: Callable[[int, int], tuple[int, ...]]
    stored: str = "{source}"

    def source(self, source: str) -> str:
        """The checkpoint's name of this part of ``source``."""
        return self.stored.format(source=source, stem=source.rpartition(".")[0])


@dataclass(frozen=True)
class Encoding:
    """How matrices [rows, inner] are kept.

    block: the smallest (rows, inner entries) that are encoded together. Slices at its multiples are slices of the
    parts. op: the name of the op that multiplies with the parts as they are; None where they are only decoded. It is
    called with (x_TI, the parts in order, rows, bias_O=None) and ``settings``, as `quant_linear`; where ``arguments``
    are given, with the parts under these names, in order, and bias_O and ``settings`` by name. moe_op: the name of the
    op that computes experts with encoded matrices, called as `quant_moe`, or with ``moe_arguments`` and
    ``settings``; None where experts stay as they are. row_op: the name of the op that looks up rows, called with
    (token_ids_T, the parts in order), dtype, scale and ``settings`` by name, as `gguf_embedding`; None where tables
    stay as they are.

    decode(parts, rows, inner): the matrix, of any floating dtype. encode(numbers): the parts of a matrix of any
    floating dtype; None where a checkpoint must bring them, and not needed with pack. pack(numbers, parts, row,
    entry, libraries): writes the encoded numbers into the memory of the whole parts, as a piece of them: from any
    row on, and from an inner entry on that is a multiple of the block's; may use a routine of the artifact's libraries,
    which may be None.

    devices: where the ops have kernels for it. repacked: the names of encodings that stand for exactly the same
    numbers, each with the function from the parts (of a matrix [rows, inner]; and such a libraries) to its parts. A
    checkpoint's matrix is repacked while it is read, for an op that reads the other encoding; the first one that an op
    of the device reads is taken.
    """

    name: str
    parts: tuple[Part, ...]
    block: tuple[int, int]
    op: str | None
    decode: Decoder
    encode: Encoder | None = None
    pack: Packer | None = None
    moe_op: str | None = None
    row_op: str | None = None
    arguments: tuple[str, ...] = ()
    moe_arguments: tuple[tuple[str, ...], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    repacked: tuple[tuple[str, Repacker], ...] = ()

    def repacker(self, name: str) -> Repacker | None:
        """What makes the parts of the encoding of that name out of this one's; None where nothing does."""
        return dict(self.repacked).get(name)

    def part(self, name: str) -> Part:
        """The part of that name. Raises KeyError."""
        for p in self.parts:
            if p.name == name:
                return p
        raise KeyError(name)

    @property
    def writes(self) -> bool:
        """Whether plain numbers can be encoded."""
        return self.encode is not None or self.pack is not None

    def encoded(self, numbers: Tensor, libraries: Libraries | None = None) -> Mapping[str, Tensor]:
        """The parts of a matrix, by the fastest way there is. Raises ConfigError where there is none."""
        if self.pack is not None:
            import torch

            parts = {
                p.name: torch.zeros(p.shape(*numbers.shape), dtype=getattr(torch, p.dtype), device=numbers.device)
                for p in self.parts
            }
            self.pack(numbers, parts, 0, 0, libraries)
            return parts
        if self.encode is None:
            raise ConfigError(f"encoding: {self.name!r} is only read; take a checkpoint that stores it")
        return self.encode(numbers)

    def along(self, part: Part, dim: int, extent: tuple[int, int]) -> tuple[int, int] | None:
        """Where rows (dim 0) or inner entries (dim 1) lie in a part of a matrix of that extent: the part's dimension
        and its entries for each block; None where the part does not depend on them. Raises ValueError where a part
        cannot be cut."""
        unit = list(extent)
        shapes = []
        for blocks in (1, 2, 3):
            unit[dim] = blocks * self.block[dim]
            shapes.append(part.shape(*unit))
        one, two, three = shapes
        if one == two:
            return None
        moved = [d for d in range(len(one)) if one[d] != two[d]]
        if len(moved) != 1 or (two[moved[0]], three[moved[0]]) != (2 * one[moved[0]], 3 * one[moved[0]]):
            raise ValueError(f"{self.name}: {part.name} cannot be cut along dimension {dim} of the matrix")
        return moved[0], one[moved[0]]


Family = Callable[..., Encoding]  # of the name and the numbers in it
_FORMATS = Path(__file__).parent / "formats"  # graphllm's own
_encodings: dict[str, Encoding] = {}
_families: dict[str, Family] = {}


def register_family(name: str, make: Family) -> None:
    """Make encodings known that differ in whole numbers, such as "gptq-4-128": ``make(name, 4, 128)`` gives one when it
    is first asked for. Raises ValueError when the name is taken."""
    if name in _families:
        raise ValueError(f"encodings {name!r} are already registered; choose another name")
    _families[name] = make


def register_encoding(encoding: Encoding) -> Encoding:
    """Make an encoding known under its name. Raises ValueError when the name is taken or a dtype is none."""
    if encoding.name in _encodings:
        raise ValueError(f"encoding {encoding.name!r} is already registered; choose another name")
    for part in encoding.parts:
        if part.dtype not in DTYPES:
            raise ValueError(f"encoding {encoding.name}: {part.name} is of dtype {part.dtype!r}, which is none")
    _encodings[encoding.name] = encoding
    return encoding


def encoding_of(name: str) -> Encoding:
    """The encoding of that name, of graphllm or a plugin. Raises ConfigError when there is none."""
    if not is_encoding(name):
        known = sorted({n for n in _encodings if n.partition("-")[0] not in _families} | set(_families))
        raise ConfigError(
            f"encoding: {name!r} is not known, there are {', '.join(known)}; install the package that registers it"
        )
    if name not in _encodings:
        family, *numbers = name.split("-")
        register_encoding(_families[family](name, *map(int, numbers)))
    return _encodings[name]


def is_encoding(name: str) -> bool:
    """Whether there is an encoding of that name, of graphllm or a plugin."""

    def known() -> bool:
        return name in _encodings or name.partition("-")[0] in _families

    if not known():
        _load_formats()
    if not known():
        _load_plugins()
    return known()


@functools.cache
def _load_formats() -> None:
    for module in pkgutil.iter_modules([str(_FORMATS)]):
        import_module(f"graphllm.weights.formats.{module.name}")


@functools.cache
def _load_plugins() -> None:
    for plugin in entry_points(group=PLUGIN_GROUP):
        plugin.load()
