"""Adapters for serving: their matrices become the tables that ops with adapters in them read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from graphllm.config import ConfigError
from graphllm.weights.adapters.adapted import AdaptedLinear
from graphllm.weights.adapters.adapter_files import CONFIG, MERGE, Adapter, Pair, open_adapter, read_tensor
from graphllm.weights.adapters.adapter_files import adapter_digest as adapter_digest
from graphllm.weights.dtypes import ITEMSIZE

if TYPE_CHECKING:  # a folder is looked at without it
    from torch import Tensor


class _Place(NamedTuple):
    """What a module changes. part: which of the layer's, -1 for all of them together. expert: which one, -1 for all."""

    layer: AdaptedLinear
    part: int = -1
    expert: int = -1


_Places = Mapping[str, list[_Place]]


def read_adapter(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int, dtype: str) -> dict[str, Tensor]:
    """The tables of an adapter, by the names of their states, as `AdaptedLinear` says, with r = max_rank, in the dtype
    and on the CPU; linears that the adapter does not change are not there. Rows beyond a smaller rank are zero; scales
    are multiplied into B.

    Raises ConfigError, naming file, tensor or field, value and remedy, for what is broken or does not fit, all but
    numbers that are not finite before anything is read.
    """
    import torch

    adapter, places = _fitting(folder, linears, max_rank)
    kind = getattr(torch, dtype)
    tables: dict[str, Tensor] = {}
    for module, pair in adapter.pairs.items():
        a, b = _numbers(adapter, module, pair, dtype)
        for place in places[module]:
            own = []
            for which, shape in zip("ab", place.layer.tables(max_rank), strict=True):
                name = f"{place.layer.name}.lora_{which}"
                if name not in tables:
                    tables[name] = torch.zeros(shape, dtype=kind)
                own.append(tables[name])
            if pair.rank_of_each:
                _fill_stacked(place.layer, own[0], own[1], a, b, pair.rank, max_rank)
            else:
                _fill(place, own[0], own[1], a, b, max_rank)
    return tables


def check_adapter(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int) -> None:
    """Raise ConfigError as `read_adapter` does in float32. No table is made: one tensor is held at a time."""
    adapter, _ = _fitting(folder, linears, max_rank)
    for module, pair in adapter.pairs.items():
        _numbers(adapter, module, pair, "float32")


def _numbers(adapter: Adapter, module: str, pair: Pair, dtype: str) -> tuple[Tensor, Tensor]:
    """A and scale * B in the dtype."""
    import torch

    kind = getattr(torch, dtype)
    a, b = (read_tensor(info, f"{module}.{which}") for info, which in ((pair.a, "lora_A"), (pair.b, "lora_B")))
    a, b = a.to(kind), (b * pair.scale).to(kind)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ConfigError(
            f"{adapter.file}: {module} has numbers beyond {dtype}, in which the engine computes; start with "
            "--dtype bfloat16"
        )
    return a, b


def _fill(place: _Place, table_a: Tensor, table_b: Tensor, a: Tensor, b: Tensor, max_rank: int) -> None:
    """Write a module's A and B where they belong."""
    layer, part, expert = place
    rank = len(a)
    if layer.kind == "embedding":
        table_a[:, :rank], table_b[:rank] = a.T, b.T
        return
    if expert >= 0:
        table_a, table_b = table_a[expert], table_b[expert]
    b = _in_order(b.T, layer.turns).T
    start, stop = layer.parts[part].start, layer.parts[part].stop or len(b)
    column = sum(layer.widths[:part])
    table_a[part * max_rank : part * max_rank + rank] = a
    table_b[:rank, column : column + layer.widths[part]] = b[start:stop].T


def _fill_stacked(
    layer: AdaptedLinear, table_a: Tensor, table_b: Tensor, a: Tensor, b: Tensor, rank: int, max_rank: int
) -> None:
    """The same for the matrices of all experts: every part has the A of all outputs."""
    N, outputs = layer.experts, len(b)
    a_NrI, b_NrO = a.view(N, rank, -1), b.view(outputs, rank, N).permute(2, 1, 0)
    b_NrO = _in_order(b_NrO, layer.turns)
    for part in range(len(layer.parts)):
        table_a[:, part * max_rank : part * max_rank + rank] = a_NrI
    table_b[:, :rank] = b_NrO


def _in_order(outputs: Tensor, turns: tuple[int, ...]) -> Tensor:
    """Outputs [.., O] that are stored by turns, one kind after the other."""
    import torch

    if not turns:
        return outputs
    return torch.cat([kind.flatten(-2) for kind in outputs.unflatten(-1, (-1, sum(turns))).split(turns, -1)], -1)


def adapter_bytes(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int, dtype: str) -> int:
    """Bytes of the tables that `read_adapter` would make, from the header. Raises ConfigError as it does."""
    _, places = _fitting(folder, linears, max_rank)
    changed = {place.layer.name: place.layer for found in places.values() for place in found}.values()
    return sum(math.prod(shape) for one in changed for shape in one.tables(max_rank)) * ITEMSIZE[dtype]


def _fitting(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int) -> tuple[Adapter, _Places]:
    """An adapter that can be served, and by module the parts of linears that it changes."""
    adapter = open_adapter(folder)
    check_served(adapter)
    places = _places(adapter, linears)
    for module, pair in adapter.pairs.items():
        if pair.rank > max_rank:
            raise ConfigError(
                f"{adapter.file}: {module} has rank {pair.rank}, the engine's tables hold {max_rank}; start with "
                f"--max-lora-rank {pair.rank}"
            )
        _check_shapes(adapter, module, pair, places[module])
    return adapter, places


def check_served(adapter: Adapter) -> None:
    """Raise ConfigError for an adapter that must be merged."""
    for field, neutral in (("use_dora", False), ("bias", "none"), ("lora_bias", False), ("modules_to_save", None)):
        value = adapter.config.get(field)
        if value not in (neutral, None, [], ""):
            raise ConfigError(f"{adapter.folder / CONFIG}: {field} is {value!r:.80}, which cannot be served; {MERGE}")
    for module, pair in adapter.pairs.items():
        kinds = (("lora_magnitude_vector", pair.magnitude), ("a bias", pair.bias))
        if found := [kind for kind, there in kinds if there]:
            raise ConfigError(f"{adapter.file}: {module} has {found[0]}, which cannot be served; {MERGE}")
    # PEFT saves an adapter's head or embedding with the matrix itself, which training leaves as it is.
    copies = {
        f"{module}.weight": (pair.b.shape[0], pair.a.shape[1])[:: -1 if pair.embedding else 1]
        for module, pair in adapter.pairs.items()
    }
    if more := [name for name, info in adapter.saved.items() if copies.get(name) != info.shape]:
        raise ConfigError(f"{adapter.file}: {min(more)} is no lora_A or lora_B, and cannot be served; {MERGE}")


def _places(adapter: Adapter, linears: Sequence[AdaptedLinear]) -> _Places:
    known: dict[str, list[_Place]] = {}
    for linear in linears:
        for number, part in enumerate(linear.parts):
            for module in part.modules:
                for expert in range(linear.experts) or (-1,):
                    known.setdefault(module.format(expert), []).append(_Place(linear, number, expert))
        for name in linear.stacked:
            known.setdefault(name, []).append(_Place(linear))
    if strange := [module for module in adapter.pairs if module not in known]:
        there = sorted({module.rpartition(".")[2] for module in known})
        raise ConfigError(
            f"{adapter.file}: {strange[0]} is none of the layers that adapters may change here "
            f"({', '.join(there)}); give an adapter for this model, widen --lora-target-modules, or {MERGE}"
        )
    return {module: known[module] for module in adapter.pairs}


def _check_shapes(adapter: Adapter, module: str, pair: Pair, places: list[_Place]) -> None:
    outputs, inputs = pair.b.shape[0], pair.a.shape[1]
    wanted = max(
        sum(layer.widths) if part < 0 else layer.parts[part].stop or layer.widths[part] for layer, part, _ in places
    )
    for linear, part, _ in places:
        if pair.embedding != (linear.kind == "embedding"):
            kind = "an embedding" if linear.kind == "embedding" else "no embedding"
            raise ConfigError(f"{adapter.file}: {module} is {kind} in this model; give an adapter for this model")
        if part < 0 and pair.a.shape[0] != pair.rank * linear.experts:
            raise ConfigError(
                f"{adapter.file}: {module} has {pair.a.shape[0]} rows of lora_A, {linear.experts} experts of rank "
                f"{pair.rank} have {pair.rank * linear.experts}; give an adapter for this model"
            )
        if inputs != linear.inputs or outputs != wanted:
            raise ConfigError(
                f"{adapter.file}: {module} has {inputs} inputs and {outputs} outputs, the model's has {linear.inputs} "
                f"inputs and {wanted} outputs; give an adapter for this model"
            )
