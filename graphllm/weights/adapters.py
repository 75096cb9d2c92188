"""Adapters for serving: their matrices become the tables that the op `add_lora` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphllm.config import ConfigError
from graphllm.weights.adapted import AdaptedLinear
from graphllm.weights.adapter_files import CONFIG, MERGE, Adapter, Pair, open_adapter, read_tensor
from graphllm.weights.adapter_files import adapter_digest as adapter_digest
from graphllm.weights.dtypes import ITEMSIZE

if TYPE_CHECKING:  # a folder is looked at without it
    from torch import Tensor

_Places = Mapping[str, list[tuple[AdaptedLinear, int]]]


def read_adapter(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int, dtype: str) -> dict[str, Tensor]:
    """The tables of an adapter, by the names of their states: "<linear>.lora_a" [n R, I] and "<linear>.lora_b" [R, O],
    with R = max_rank, in the dtype and on the CPU; linears that the adapter leaves alone are not there. Rows behind a
    smaller rank are zero; scales are multiplied into B.

    Raises ConfigError, naming file, tensor or field, value and remedy, for what is broken or does not fit, all but
    numbers that are not finite before anything is read.
    """
    import torch

    adapter, places = _fitting(folder, linears, max_rank)
    kind = getattr(torch, dtype)
    tables: dict[str, Tensor] = {}
    for module, pair in adapter.pairs.items():
        a, b = (read_tensor(info, f"{module}.{which}") for info, which in ((pair.a, "lora_A"), (pair.b, "lora_B")))
        a, b = a.to(kind), (b * pair.scale).to(kind)
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ConfigError(
                f"{adapter.file}: {module} has numbers beyond {dtype}, in which the engine computes; start with "
                "--dtype bfloat16"
            )
        for linear, part in places[module]:
            n, outputs = len(linear.parts), sum(linear.widths)
            whole_a = tables.setdefault(f"{linear.name}.lora_a", torch.zeros(n * max_rank, linear.inputs, dtype=kind))
            whole_b = tables.setdefault(f"{linear.name}.lora_b", torch.zeros(max_rank, outputs, dtype=kind))
            start, stop = linear.parts[part].start, linear.parts[part].stop or len(b)
            column = sum(linear.widths[:part])
            whole_a[part * max_rank : part * max_rank + pair.rank] = a
            whole_b[: pair.rank, column : column + linear.widths[part]] = b[start:stop].T
    return tables


def adapter_bytes(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int, dtype: str) -> int:
    """Bytes of the tables that `read_adapter` would make, from the header alone. Raises ConfigError as it does."""
    _, places = _fitting(folder, linears, max_rank)
    changed = {linear.name: linear for found in places.values() for linear, _ in found}.values()
    entries = sum(len(one.parts) * one.inputs + sum(one.widths) for one in changed)
    return entries * max_rank * ITEMSIZE[dtype]


def _fitting(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int) -> tuple[Adapter, _Places]:
    """An adapter that can be served, and by module the parts of linears that it changes."""
    adapter = open_adapter(folder)
    _check_served(adapter)
    places = _places(adapter, linears)
    for module, pair in adapter.pairs.items():
        if pair.rank > max_rank:
            raise ConfigError(
                f"{adapter.file}: {module} has rank {pair.rank}, the engine's tables hold {max_rank}; start with "
                f"--max-lora-rank {pair.rank}"
            )
        _check_shapes(adapter, module, pair, places[module])
    return adapter, places


def _check_served(adapter: Adapter) -> None:
    for field, neutral in (("use_dora", False), ("bias", "none"), ("lora_bias", False), ("modules_to_save", None)):
        value = adapter.config.get(field)
        if value not in (neutral, None, [], ""):
            raise ConfigError(f"{adapter.folder / CONFIG}: {field} is {value!r:.80}, which cannot be served; {MERGE}")
    for module, pair in adapter.pairs.items():
        kinds = (("lora_embedding_A", pair.embedding), ("lora_magnitude_vector", pair.magnitude), ("a bias", pair.bias))
        if found := [kind for kind, there in kinds if there]:
            raise ConfigError(f"{adapter.file}: {module} has {found[0]}, which cannot be served; {MERGE}")
    # PEFT saves an adapter's head with the head itself, which training leaves as it is.
    copies = {f"{module}.weight": (pair.b.shape[0], pair.a.shape[1]) for module, pair in adapter.pairs.items()}
    if more := [name for name, info in adapter.saved.items() if copies.get(name) != info.shape]:
        raise ConfigError(
            f"{adapter.file}: {min(more)} is no lora_A or lora_B of a linear layer, and cannot be served; {MERGE}"
        )


def _places(adapter: Adapter, linears: Sequence[AdaptedLinear]) -> _Places:
    known: dict[str, list[tuple[AdaptedLinear, int]]] = {}
    for linear in linears:
        for number, part in enumerate(linear.parts):
            for module in part.modules:
                known.setdefault(module, []).append((linear, number))
    if strange := [module for module in adapter.pairs if module not in known]:
        there = sorted({module.rpartition(".")[2] for module in known})
        raise ConfigError(
            f"{adapter.file}: {strange[0]} is none of the linear layers that adapters may change here "
            f"({', '.join(there)}); give an adapter for this model, widen --lora-target-modules, or {MERGE}"
        )
    return {module: known[module] for module in adapter.pairs}


def _check_shapes(adapter: Adapter, module: str, pair: Pair, places: list[tuple[AdaptedLinear, int]]) -> None:
    outputs, inputs = pair.b.shape[0], pair.a.shape[1]
    wanted = max(linear.parts[number].stop or linear.widths[number] for linear, number in places)
    for linear, _ in places:
        if inputs != linear.inputs or outputs != wanted:
            raise ConfigError(
                f"{adapter.file}: {module} has {inputs} inputs and {outputs} outputs, the model's has {linear.inputs} "
                f"inputs and {wanted} outputs; give an adapter for this model"
            )
