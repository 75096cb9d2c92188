"""LoRA adapters as PEFT writes them: ``adapter_config.json`` and ``adapter_model.safetensors`` become the tables that
the op `add_lora` reads.

A module's change is scale * B @ A, with A [r, inputs] and B [outputs, r]; the scale is alpha / r, or alpha / sqrt(r)
with rsLoRA.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.config.fields import read_json
from graphllm.weights.adapted import AdaptedLinear
from graphllm.weights.checkpoint import read_header
from graphllm.weights.dtypes import BY_TAG
from graphllm.weights.tensor_info import TensorInfo

if TYPE_CHECKING:  # a folder is looked at without it
    from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MERGE = "merge it into the checkpoint with `graphllm merge`"
_PLAIN = ("F64", "F32", "F16", "BF16")
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")


class Pair(NamedTuple):
    """A module's A and B in the file, and the scale of their product."""

    a: TensorInfo
    b: TensorInfo
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def read_adapter(folder: Path, linears: Sequence[AdaptedLinear], max_rank: int, dtype: str) -> dict[str, Tensor]:
    """The tables of an adapter, by the names of their states: "<linear>.lora_a" [n R, I] and "<linear>.lora_b" [R, O],
    with R = max_rank, in the dtype and on the CPU; linears that the adapter leaves alone are not there. Rows behind a
    smaller rank are zero; scales are multiplied into B.

    Raises ConfigError, naming file, tensor or field, value and remedy, for what is broken or does not fit, all but
    numbers that are not finite before anything is read.
    """
    import torch

    pairs = open_adapter(folder)
    places = _places(folder, pairs, linears)
    for module, pair in pairs.items():
        if pair.rank > max_rank:
            raise ConfigError(
                f"{folder / TENSORS}: {module} has rank {pair.rank}, the engine's tables hold {max_rank}; start with "
                f"--max-lora-rank {pair.rank}"
            )
        for linear, part in places[module]:
            _check_shapes(folder, module, pair, linear, part)
    kind = getattr(torch, dtype)
    tables: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        a, b = (_read(folder, module, info) for info in (pair.a, pair.b))
        b *= pair.scale
        for linear, part in places[module]:
            n, outputs = len(linear.parts), sum(linear.widths)
            whole_a = tables.setdefault(f"{linear.name}.lora_a", torch.zeros(n * max_rank, linear.inputs, dtype=kind))
            whole_b = tables.setdefault(f"{linear.name}.lora_b", torch.zeros(max_rank, outputs, dtype=kind))
            start, stop = linear.parts[part].start, linear.parts[part].stop or len(b)
            column = sum(linear.widths[:part])
            whole_a[part * max_rank : part * max_rank + pair.rank] = a
            whole_b[: pair.rank, column : column + linear.widths[part]] = b[start:stop].T
    return tables


def adapter_digest(folder: Path) -> str:
    """SHA-256 of an adapter's files. Raises ConfigError where one is missing."""
    whole = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        try:
            with (folder / name).open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as problem:
            raise ConfigError(_missing(folder, name)) from problem
    return whole.hexdigest()


def open_adapter(folder: Path) -> dict[str, Pair]:
    """The modules that an adapter changes, by their names in the checkpoint. Raises ConfigError for files that are
    missing or broken, and for kinds of adapters that cannot be added while serving."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(_missing(folder, CONFIG))
    config = read_json(folder / CONFIG) or {}
    _check_config(folder, config)
    if not (folder / TENSORS).is_file():
        raise ConfigError(_missing(folder, TENSORS))
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in read_header(folder / TENSORS).items():
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise ConfigError(f"{folder / TENSORS}: {name} {_why(name)}")
        if info.dtype not in _PLAIN or len(info.shape) != 2:
            raise ConfigError(
                f"{folder / TENSORS}: {name} is {info.dtype} {list(info.shape)}; adapters are matrices in "
                "float32, float16 or bfloat16"
            )
        found.setdefault(matched["module"], {})[matched["which"]] = info
    if not found:
        raise ConfigError(f"{folder / TENSORS}: there is no tensor in it; save the adapter again")
    pairs = {}
    for module, both in found.items():
        if len(both) != 2:
            missing = "lora_B" if "A" in both else "lora_A"
            raise ConfigError(f"{folder / TENSORS}: {module} has no {missing}; save the adapter again")
        pairs[module] = _pair(folder, config, module, both["A"], both["B"])
    return pairs


def _pair(folder: Path, config: Mapping[str, Any], module: str, a: TensorInfo, b: TensorInfo) -> Pair:
    rank = a.shape[0]
    if not rank or b.shape[1] != rank:
        raise ConfigError(
            f"{folder / TENSORS}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; the first dimension "
            "of one is the second of the other"
        )
    said = _of_module(config, "rank_pattern", module, config.get("r"))
    if said != rank:
        raise ConfigError(
            f"{folder / CONFIG}: r of {module} is {said}, its tensors have {rank}; save the adapter again"
        )
    alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha", 8))
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ConfigError(f"{folder / CONFIG}: lora_alpha is {alpha!r:.80}: give a number")
    return Pair(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_module(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """What a pattern says of a module: its keys are regular expressions of the ends of names."""
    patterns = config.get(field) or {}
    return next((v for key, v in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module)), default)


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{folder / CONFIG}: peft_type is {kind!r:.80}; only LORA adapters are served")
    for field, neutral in (("use_dora", False), ("bias", "none"), ("lora_bias", False), ("modules_to_save", None)):
        value = config.get(field)
        if value not in (neutral, None, [], ""):
            raise ConfigError(f"{folder / CONFIG}: {field} is {value!r:.80}, which cannot be served; {_MERGE}")


def _why(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return f"is of DoRA, which cannot be served; {_MERGE}"
    if "lora_embedding" in name:
        return f"is of an embedding, which cannot be served; {_MERGE}"
    return f"is no lora_A or lora_B of a linear layer, and cannot be served; {_MERGE}"


def _missing(folder: Path, name: str) -> str:
    if name == TENSORS and (folder / "adapter_model.bin").exists():
        return (
            f"{folder}: the adapter is in adapter_model.bin, which can run code when it is read; save it again with "
            "safe_serialization=True"
        )
    return f"{folder / name} is not there; give the folder of a LoRA adapter in PEFT's format"


def _places(
    folder: Path, pairs: Mapping[str, Pair], linears: Sequence[AdaptedLinear]
) -> dict[str, list[tuple[AdaptedLinear, int]]]:
    """By module, the parts of linears that it changes."""
    known: dict[str, list[tuple[AdaptedLinear, int]]] = {}
    for linear in linears:
        for number, part in enumerate(linear.parts):
            for module in part.modules:
                known.setdefault(module, []).append((linear, number))
    if strange := [module for module in pairs if module not in known]:
        there = sorted({module.rpartition(".")[2] for module in known})
        raise ConfigError(
            f"{folder / TENSORS}: {strange[0]} is none of the linear layers that adapters may change here "
            f"({', '.join(there)}); give an adapter for this model, widen --lora-target-modules, or {_MERGE}"
        )
    return {module: known[module] for module in pairs}


def _check_shapes(folder: Path, module: str, pair: Pair, linear: AdaptedLinear, number: int) -> None:
    part, outputs, inputs = linear.parts[number], pair.b.shape[0], pair.a.shape[1]
    fits = part.stop <= outputs if part.stop else outputs == linear.widths[number]
    if inputs != linear.inputs or not fits:
        wanted = f"{linear.inputs} inputs and {part.stop or linear.widths[number]} outputs"
        raise ConfigError(
            f"{folder / TENSORS}: {module} has {inputs} inputs and {outputs} outputs, the model's has {wanted}; give "
            "an adapter for this model"
        )


def _read(folder: Path, module: str, info: TensorInfo) -> Tensor:
    """A tensor of the file, in float32."""
    import torch

    with info.file.open("rb") as file:
        file.seek(info.offset)
        data = bytearray(file.read(info.nbytes))
    if len(data) != info.nbytes:
        raise ConfigError(f"{info.file}: it ends within {module}; copy it again")
    values = torch.frombuffer(data, dtype=getattr(torch, BY_TAG[info.dtype].name)).view(info.shape).float()
    if not torch.isfinite(values).all():
        raise ConfigError(f"{info.file}: {module} has numbers that are not finite; save the adapter again")
    return values
