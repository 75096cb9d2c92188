"""The weight plan: for every finished parameter, what it looks like and the expression that makes it, as plain data.

The plan is derived from a model once, at compile time (`make_plan`), and stored in the artifact as ``weights.json``.
The loader evaluates it without knowing the model. What a pass does to a weight is an edit of its `Entry`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from graphllm.config import ConfigError
from graphllm.weights.dtypes import ITEMSIZE
from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan.division import Division
from graphllm.weights.plan.expr import (
    ANY,
    Concat,
    Decode,
    Expr,
    Permute,
    Read,
    Reshape,
    Slice,
    Stack,
    Tie,
    Values,
    from_plain,
    renamed,
    to_plain,
)

if TYPE_CHECKING:  # importing ir imports torch; a plan is read without it
    from graphllm.ir.model import Model
    from graphllm.ir.weight import Shard, Weight

FORMAT = 2


@dataclass(frozen=True)
class Entry:
    """One finished parameter. dtype: a key of `ITEMSIZE`; what the expression gives is cast to it.

    shard, segments, expert_axis, heads: what the model says about dividing it, see `Weight`; who divides the plan reads
    them. They are not about bytes: who replaces an entry by what is encoded hands them on. exact: is not to be
    encoded, unless the checkpoint does so. division, undivided: of one that tensor-parallel ranks have divided, what
    each has, and the expression for all of it; who loads a plan needs neither.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    expr: Expr
    shard: Shard | None = None
    segments: tuple[int, ...] = ()
    expert_axis: int | None = None
    exact: bool = False
    heads: tuple[int, ...] = ()
    division: Division | None = None
    undivided: Expr | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of all ranks together."""
        if self.division is None:
            return self.shape
        dim = self.division.dim
        return (*self.shape[:dim], self.division.whole, *self.shape[dim + 1 :])

    @property
    def tie(self) -> str | None:
        """The entry that this one shares memory with, if it has no memory of its own."""
        return self.expr.to if isinstance(self.expr, Tie) else None

    @property
    def nbytes(self) -> int:
        """Memory of its own: zero for a tie."""
        return 0 if self.tie else math.prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        sharded = f"  sharded by {self.shard}" if self.shard else ""
        return f"{self.name}  {self.dtype} [{', '.join(map(str, self.shape))}]  {self.expr}{sharded}"


@dataclass(frozen=True)
class WeightPlan:
    """All parameters of a model, in the order embed, layers, head."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        """The entry of that name. Raises KeyError."""
        for e in self.entries:
            if e.name == name:
                return e
        raise KeyError(name)

    def __str__(self) -> str:
        return "".join(f"{e}\n" for e in self.entries)

    def expr_of(self, name: str) -> Expr:
        """The expression that fills an entry's memory: for a tie, that of the entry that owns it."""
        e = self[name]
        return self[e.tie].expr if e.tie else e.expr

    def replace(self, name: str, *by: Entry) -> WeightPlan:
        """The plan with other entries in the place of one. What was tied to it then owns memory: the first such entry
        takes its expression, the others are tied to that one."""
        old, heir = self[name], None
        entries: list[Entry] = []
        for e in self.entries:
            if e.name == name:
                entries += by
            elif e.tie != name:
                entries.append(e)
            elif heir is None:
                heir = dataclasses.replace(e, expr=old.expr)
                entries.append(heir)
            else:
                entries.append(dataclasses.replace(e, expr=Tie(heir.name)))
        return WeightPlan(tuple(entries))

    def chosen(self, names: Collection[str] | None) -> WeightPlan:
        """The entries with these names, and the entries that they are tied to; None for all."""
        if names is None:
            return self
        roots = {entry.tie for entry in self if entry.name in names and entry.tie}
        return WeightPlan(tuple(entry for entry in self if entry.name in names or entry.name in roots))

    @property
    def total_bytes(self) -> int:
        """Exactly what the loaded parameters occupy."""
        return sum(e.nbytes for e in self.entries)

    def to_json(self) -> str:
        """Canonical: equal plans give equal text."""
        plain = {"format": FORMAT, "entries": [_entry_to_plain(e) for e in self.entries]}
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> WeightPlan:
        """The plan written by `to_json`. Raises ConfigError when it is damaged or of another format."""
        try:
            plain = json.loads(text)
            found = plain["format"]
            if found == FORMAT:
                return WeightPlan(tuple(_entry_from_plain(e) for e in plain["entries"]))
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"weight plan: damaged ({e!r}); compile the artifact again") from e
        raise ConfigError(f"weight plan: format {found!r}, this graphllm reads {FORMAT}; compile the artifact again")


def make_plan(model: Model, config: Any, dtype: str) -> WeightPlan:
    """The plan of a model's parameters with ``dtype`` for those that do not fix their own.

    Names: "embed.<n>", "layers.<i>.<n>", "head.<n>", "project.<n>", after the prefix of a further graph. Raises
    ValueError, naming the parameter, for a `Weight` that contradicts itself: that is a mistake in the model file.
    """
    entries: list[Entry] = []
    for graph in model.graphs:
        prefix = graph.prefix
        entries += [_entry(f"{prefix}embed.{n}", w, dtype, None) for n, w in graph.embed_weights(config).items()]
        by_type: dict[str, dict[str, Weight]] = {}
        for i, layer_type in enumerate(graph.layer_types(config)):
            if layer_type not in by_type:
                by_type[layer_type] = graph.layer_weights(config, layer_type)
            entries += [_entry(f"{prefix}layers.{i}.{n}", w, dtype, i) for n, w in by_type[layer_type].items()]
        entries += [_entry(f"{prefix}head.{n}", w, dtype, None) for n, w in graph.head_weights(config).items()]
        entries += [_entry(f"{prefix}project.{n}", w, dtype, None) for n, w in graph.project_weights(config).items()]
    _check_ties({e.name: e for e in entries})
    return WeightPlan(tuple(entries))


def _entry(name: str, w: Weight, model_dtype: str, layer: int | None) -> Entry:
    dtype = model_dtype if w.dtype == "model" else w.dtype
    if dtype not in ITEMSIZE:
        raise ValueError(f"{name}: dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")
    if (bool(w.sources), w.tie is not None, w.value is not None, w.expr is not None).count(True) != 1:
        raise ValueError(f"{name}: give exactly one of sources, tie, value and expr")
    expr: Expr
    if w.tie is not None:
        expr = Tie(_fill_layer(w.tie, layer))
    elif w.value is not None:
        expr = Values(tuple(float(v) for v in w.value), w.shape)
    elif w.expr is not None:
        expr = renamed(cast(Expr, w.expr), lambda source: _fill_layer(source, layer))
    else:
        expr = expr_of_sources(name, w, layer)
    try:
        if not isinstance(expr, Tie) and expr.shape != w.shape:
            raise ValueError(f"its expression gives {expr.shape}, not {w.shape}")
    except ValueError as contradiction:
        raise ValueError(f"{name}: {contradiction}") from contradiction
    return Entry(name, w.shape, dtype, expr, w.shard, w.segments, w.expert_axis, w.exact, w.heads)


def expr_of_sources(name: str, w: Weight, layer: int | None) -> Expr:
    """The checkpoint tensors, one after the other."""
    if len(w.sources) == 1:  # segments then only tell sharding where the parts are
        pieces, lead = w.shape[:1] or (1,), 1
    elif len(w.segments) == len(w.sources):
        pieces, lead = w.segments, _leading_dims(name, w)
    else:
        raise ValueError(f"{name}: {len(w.sources)} checkpoint tensors need as many segments, not {w.segments}")
    if w.slice_rows is not None and (len(w.sources) != 1 or w.slice_rows[1] - w.slice_rows[0] <= 0):
        raise ValueError(f"{name}: slice_rows {w.slice_rows} needs a single checkpoint tensor and a range [a, b)")
    trailing = w.shape[lead:]
    if w.transpose and len(trailing) != 1:
        raise ValueError(f"{name}: transpose is for matrices, not {w.shape}")
    if w.encoding is not None and (len(trailing) != 1 or w.slice_rows):
        raise ValueError(f"{name}: encoding {w.encoding!r} is for whole matrices, not {w.shape}")
    parts: list[Expr] = []
    for names, rows in zip(w.sources, pieces, strict=True):
        shape = (*trailing, rows) if w.transpose else ((rows, *trailing) if w.shape else ())
        if w.slice_rows is not None and shape[0] != w.slice_rows[1] - w.slice_rows[0]:
            raise ValueError(f"{name}: slice_rows {w.slice_rows} does not give the {shape[0]} rows of {shape}")
        alternatives = (names,) if isinstance(names, str) else names
        source = tuple(_fill_layer(n, layer) for n in alternatives)
        part: Expr
        if w.encoding is not None:
            part = decoded(w.encoding, source, (shape[0], shape[1]))
        elif w.slice_rows is not None:
            part = Slice(Read(source, (ANY, *shape[1:])), 0, *w.slice_rows)
        else:
            part = Read(source, shape)
        parts.append(Permute(part, (1, 0)) if w.transpose else part)
    return parts[0] if len(parts) == 1 else _merged(parts, w.shape, lead)


def _merged(parts: list[Expr], shape: tuple[int, ...], lead: int) -> Expr:
    """Parts with rows that run over the leading dimensions of a shape. Where each entry of dimension 0, an expert, has
    as many parts as any other, they are stacked: slices then come down to the reads."""
    if lead == 1:
        return Concat(tuple(parts))
    each = len(parts) // shape[0]
    if lead == 2 and len(parts) == each * shape[0]:
        experts = [parts[i : i + each] for i in range(0, len(parts), each)]
        if all(sum(p.shape[0] for p in expert) == shape[1] for expert in experts):
            return Stack(tuple(e[0] if each == 1 else Concat(tuple(e)) for e in experts))
    return Reshape(Concat(tuple(parts)), shape)


def decoded(encoding: str, sources: tuple[str, ...], matrix: tuple[int, int]) -> Decode:
    """A matrix [rows, inner] that a checkpoint stores encoded, under the names that the encoding gives its parts."""
    reads = tuple(
        Read(tuple(part.source(s) for s in sources), part.shape(*matrix), part.dtype)
        for part in encoding_of(encoding).parts
    )
    return Decode(encoding, reads, matrix)


def _leading_dims(name: str, w: Weight) -> int:
    """How many leading dimensions of the parameter the segments' rows run over: usually 1, 2 for stacked experts."""
    for lead in range(1, len(w.shape) + 1):
        if math.prod(w.shape[:lead]) == sum(w.segments):
            return lead
    raise ValueError(f"{name}: segments {w.segments} do not add up to the rows of {w.shape}")


def _fill_layer(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace("{layer}", str(layer))


def _check_ties(entries: Mapping[str, Entry]) -> None:
    for e in entries.values():
        if e.tie is None:
            continue
        root = entries.get(e.tie)
        if root is None or root.tie is not None:
            raise ValueError(f"{e.name}: tied to {e.tie!r}, which is no parameter with memory of its own")
        if (root.shape, root.dtype) != (e.shape, e.dtype):
            raise ValueError(f"{e.name}: {e.shape} {e.dtype}, but tied to {e.tie!r}: {root.shape} {root.dtype}")


def _entry_to_plain(e: Entry) -> dict[str, Any]:
    plain = {f.name: getattr(e, f.name) for f in dataclasses.fields(e) if f.name not in ("division", "undivided")}
    return {**plain, "expr": to_plain(e.expr)}


def _entry_from_plain(plain: dict[str, Any]) -> Entry:
    try:
        fields = {name: from_plain(value) for name, value in plain.items()}
    except KeyError as unknown:
        raise ConfigError(f"weight plan: {plain['name']}: unknown expression {unknown}; update graphllm") from unknown
    entry = Entry(**fields)
    if not isinstance(entry.expr, Expr) or entry.dtype not in ITEMSIZE:
        raise ValueError(f"{entry.name}: no expression, or unknown dtype {entry.dtype!r}")
    return entry
