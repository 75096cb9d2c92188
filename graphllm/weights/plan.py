"""The weight plan: for every finished parameter, what it looks like and the steps that make it, as plain data.

The plan is derived from a model once, at compile time (`make_plan`), and stored in the artifact as ``weights.json``.
The loader executes it without knowing the model. What a pass does to a weight is an edit of its `Entry`; a new kind of
step is a frozen dataclass under `@step`, and the code in the loader that executes it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from graphllm.config import ConfigError
from graphllm.ir.weight import Weight

if TYPE_CHECKING:  # ir.model imports torch; a plan is read without it
    from graphllm.ir.model import Model

FORMAT = 1
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "uint8": 1}

_steps: dict[str, type[Step]] = {}


class Step:
    """Base of everything an entry's ``steps`` may hold: a frozen dataclass of numbers, strings and tuples of them."""

    op: ClassVar[str]


def step(op: str) -> Callable[[type[Step]], type[Step]]:
    """Make a step class known under its tag in the JSON."""

    def add(cls: type[Step]) -> type[Step]:
        cls.op = op
        _steps[op] = cls
        return cls

    return add


@step("read")
@dataclass(frozen=True)
class Read(Step):
    """Copy one checkpoint tensor, or rows of it, into rows of the parameter, casting to the parameter's dtype.

    source: its names, the first one present is taken. shape: of what is taken, as the checkpoint stores it. rows: take
    rows [a, b) of the stored tensor, else all of it. transpose: store it transposed. row: where it lands, counted in
    rows of the (transposed) piece, so that a parameter of shape (N, F, D) may be made of N pieces of (F, D).
    """

    source: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transpose: bool = False
    row: int = 0

    @property
    def key(self) -> tuple[tuple[str, ...], tuple[int, int] | None]:
        """Equal for reads of the same numbers."""
        return (self.source, self.rows)

    @property
    def offset(self) -> int:
        """The first element of the parameter, in row-major order, that this piece fills."""
        width = self.shape[:1] if self.transpose else self.shape[1:]
        return self.row * math.prod(width)


@step("values")
@dataclass(frozen=True)
class Values(Step):
    """The parameter is these numbers, in row-major order."""

    values: tuple[float, ...]


@step("tie")
@dataclass(frozen=True)
class Tie(Step):
    """The parameter is the entry ``to``: the same memory, nothing is read."""

    to: str


@step("quantize")
@dataclass(frozen=True)
class Quantize(Step):
    """What the steps before it read is a matrix of ``shape``, which is rounded and packed: the parameter takes the
    integers, the entry ``scales`` the scales. format: a key of `formats.FORMATS`."""

    format: str
    shape: tuple[int, int]
    scales: str


@step("made")
@dataclass(frozen=True)
class Made(Step):
    """The parameter is filled by the steps of the entry ``by``, from the same reads."""

    by: str


@dataclass(frozen=True)
class Entry:
    """One finished parameter. dtype: a key of `ITEMSIZE`. steps: executed in order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    steps: tuple[Step, ...]

    @property
    def tie(self) -> str | None:
        """The entry whose memory this one shares, if it has none of its own."""
        first = self.steps[0]
        return first.to if isinstance(first, Tie) else None

    @property
    def quantize(self) -> Quantize | None:
        """How what is read becomes this parameter and another one, if it does."""
        last = self.steps[-1]
        return last if isinstance(last, Quantize) else None

    @property
    def nbytes(self) -> int:
        """Memory of its own: zero for a tie."""
        return 0 if self.tie else math.prod(self.shape) * ITEMSIZE[self.dtype]


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

    def steps_of(self, name: str) -> tuple[Step, ...]:
        """The steps that fill an entry's memory: for a tie, those of the entry that owns it."""
        e = self[name]
        return self[e.tie].steps if e.tie else e.steps

    def replace(self, name: str, *by: Entry) -> WeightPlan:
        """The plan with other entries in the place of one. What was tied to it then owns memory: the first such entry
        takes its steps, the others are tied to that one."""
        old, heir = self[name], None
        entries: list[Entry] = []
        for e in self.entries:
            if e.name == name:
                entries += by
            elif e.tie != name:
                entries.append(e)
            elif heir is None:
                heir = dataclasses.replace(e, steps=old.steps)
                entries.append(heir)
            else:
                entries.append(dataclasses.replace(e, steps=(Tie(heir.name),)))
        return WeightPlan(tuple(entries))

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

    Names: "embed.<n>", "layers.<i>.<n>", "head.<n>", behind the prefix of a further graph. Raises ValueError, naming
    the parameter, for a `Weight` that contradicts itself: that is a mistake in the model file.
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
    _check_ties({e.name: e for e in entries})
    return WeightPlan(tuple(entries))


def _entry(name: str, w: Weight, model_dtype: str, layer: int | None) -> Entry:
    dtype = model_dtype if w.dtype == "model" else w.dtype
    if dtype not in ITEMSIZE:
        raise ValueError(f"{name}: dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")
    if (bool(w.hf), w.tie is not None, w.value is not None).count(True) != 1:
        raise ValueError(f"{name}: give exactly one of hf, tie and value")
    if w.tie is not None:
        return Entry(name, w.shape, dtype, (Tie(_fill_layer(w.tie, layer)),))
    if w.value is not None:
        if len(w.value) != math.prod(w.shape):
            raise ValueError(f"{name}: {len(w.value)} values for shape {w.shape}")
        return Entry(name, w.shape, dtype, (Values(tuple(float(v) for v in w.value)),))
    return Entry(name, w.shape, dtype, _reads(name, w, layer))


def _reads(name: str, w: Weight, layer: int | None) -> tuple[Read, ...]:
    """One `Read` for each checkpoint tensor."""
    if len(w.hf) == 1:  # segments then only tell sharding where the parts are
        pieces, lead = w.shape[:1] or (1,), 1
    elif len(w.segments) == len(w.hf):
        pieces, lead = w.segments, _leading_dims(name, w)
    else:
        raise ValueError(f"{name}: {len(w.hf)} checkpoint tensors need as many segments, not {w.segments}")
    if w.slice_rows is not None and (len(w.hf) != 1 or w.slice_rows[1] - w.slice_rows[0] <= 0):
        raise ValueError(f"{name}: slice_rows {w.slice_rows} needs a single checkpoint tensor and a range [a, b)")
    trailing = w.shape[lead:]
    if w.transpose and len(trailing) != 1:
        raise ValueError(f"{name}: transpose is for matrices, not {w.shape}")
    reads, row = [], 0
    for names, rows in zip(w.hf, pieces, strict=True):
        shape = (*trailing, rows) if w.transpose else ((rows, *trailing) if w.shape else ())
        if w.slice_rows is not None and shape[0] != w.slice_rows[1] - w.slice_rows[0]:
            raise ValueError(f"{name}: slice_rows {w.slice_rows} does not give the {shape[0]} rows of {shape}")
        alternatives = (names,) if isinstance(names, str) else names
        source = tuple(_fill_layer(n, layer) for n in alternatives)
        reads.append(Read(source, shape, w.slice_rows, w.transpose, row))
        row += rows
    return tuple(reads)


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
    steps = [{"op": s.op, **{f.name: getattr(s, f.name) for f in dataclasses.fields(s)}} for s in e.steps]  # type: ignore[arg-type]
    return {"name": e.name, "shape": e.shape, "dtype": e.dtype, "steps": steps}


def _entry_from_plain(plain: dict[str, Any]) -> Entry:
    steps = []
    for fields in plain["steps"]:
        cls = _steps.get(fields["op"])
        if cls is None:
            raise ConfigError(f"weight plan: {plain['name']}: unknown step {fields['op']!r}; update graphllm")
        steps.append(cls(**{k: _tupled(v) for k, v in fields.items() if k != "op"}))
    if not steps or plain["dtype"] not in ITEMSIZE:
        raise ValueError(f"{plain['name']}: no steps, or unknown dtype {plain['dtype']!r}")
    return Entry(plain["name"], _tupled(plain["shape"]), plain["dtype"], tuple(steps))


def _tupled(value: Any) -> Any:
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value
