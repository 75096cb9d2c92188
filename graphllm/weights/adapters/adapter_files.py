"""LoRA adapters as PEFT writes them, ``adapter_config.json`` and ``adapter_model.safetensors``: what each changes.

A module's change is scale * B @ A, with A [r, inputs] and B [outputs, r]; the scale is alpha / r, or alpha / sqrt(r)
with rsLoRA. Only headers are read here, and tensors one by one when they are asked for.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.config.fields import number, read_json, section, strings, switch, whole
from graphllm.weights.checkpoint.checkpoint import read_header
from graphllm.weights.checkpoint.tensor_info import TensorInfo
from graphllm.weights.dtypes import BY_TAG, PLAIN

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge it into the checkpoint with `graphllm merge`"
_START = "base_model.model."
_NAME = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(?:\.default)?(?:\.(?P<end>weight|bias))?"
)
# Kinds of adapters other than LoRA's own sums, by the field that asks for them; {} and [] count as nothing, too.
_OTHERS = (
    "layer_replication", "trainable_token_indices", "alora_invocation_tokens", "use_qalora",
    "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")  # matrices of all experts, in a module's order
# Of init_lora_weights: ways to begin that leave the base as it is.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


class Pair(NamedTuple):
    """What the file holds of a module: A and B, and the scale of their product. embedding: A has a column for each
    token, and B a row for each entry of its vector. magnitude: of DoRA, one for each output. bias: times the scale
    it is added to the module's own. rank_of_each: of a tensor with the matrices of all experts; A [N r, inputs] has r
    rows for one after the other, B [outputs, r N] columns for each of them by turns."""

    a: TensorInfo
    b: TensorInfo
    scale: float
    embedding: bool = False
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None
    rank_of_each: int = 0

    @property
    def rank(self) -> int:
        return self.rank_of_each or self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An opened folder. pairs: by the names of modules in the checkpoint, or of the tensors of all experts. saved:
    tensors of the base that it brings whole, by their names there. transposed: the base stores matrices as [inputs,
    outputs] (`Conv1D`)."""

    folder: Path
    config: Mapping[str, Any]
    pairs: Mapping[str, Pair]
    saved: Mapping[str, TensorInfo]
    transposed: bool

    @property
    def file(self) -> Path:
        return self.folder / TENSORS


def open_adapter(folder: Path) -> Adapter:
    """Read the config and the header. Raises ConfigError for files that are missing or broken, and for adapters that
    are more than sums of low rank."""
    config = read_json(folder / CONFIG)
    if config is None:
        raise ConfigError(_missing(folder, CONFIG))
    _check_kind(folder, config)
    try:
        settings = _settings(config)
    except ConfigError as mistake:
        raise ConfigError(f"{folder / CONFIG}: {str(mistake).removeprefix('config.json: ')}") from mistake
    if not (folder / TENSORS).is_file():
        raise ConfigError(_missing(folder, TENSORS))
    found: dict[str, dict[str, TensorInfo]] = {}
    saved: dict[str, TensorInfo] = {}
    for full, info in read_header(folder / TENSORS).items():
        name = full.removeprefix(_START)
        matched = _NAME.fullmatch(name)
        if matched is None:
            of, key = saved, name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        else:
            end = ".bias" if matched["end"] == "bias" else ""
            of, key = found.setdefault(matched["module"], {}), matched["kind"] + end
        if key in of:
            raise ConfigError(f"{folder / TENSORS}: {full} is there twice, under two names; save the adapter again")
        if info.dtype not in BY_TAG or BY_TAG[info.dtype].name not in PLAIN:
            raise ConfigError(
                f"{folder / TENSORS}: {full} is {info.dtype}; adapters are in float32, float16 or bfloat16"
            )
        of[key] = info
    if not found and not saved:
        raise ConfigError(f"{folder / TENSORS}: there is no tensor in it; save the adapter again")
    stacked = _stacked(found, settings.targets)
    pairs = {
        stacked.get(module, module): _pair(folder, settings, stacked.get(module, module), tensors, module in stacked)
        for module, tensors in found.items()
    }
    return Adapter(folder, config, pairs, saved, settings.transposed)


def adapter_digest(folder: Path) -> str:
    """SHA-256 of an adapter's files. Raises ConfigError where one is missing."""
    both = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        try:
            with (folder / name).open("rb") as file:
                both.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as problem:
            raise ConfigError(_missing(folder, name)) from problem
    return both.hexdigest()


def read_tensor(info: TensorInfo, what: str) -> Tensor:
    """A tensor of an adapter, in float32. Raises ConfigError naming ``what`` where numbers are missing or not
    finite."""
    import torch

    try:
        with info.file.open("rb") as file:
            file.seek(info.offset)
            data = bytearray(file.read(info.nbytes))
    except OSError as problem:
        raise ConfigError(_missing(info.file.parent, info.file.name)) from problem
    if len(data) != info.nbytes:
        raise ConfigError(f"{info.file}: it ends within {what}; copy it again")
    values = torch.frombuffer(data, dtype=getattr(torch, BY_TAG[info.dtype].name)).view(info.shape).float()
    if not torch.isfinite(values).all():
        raise ConfigError(f"{info.file}: {what} has numbers that are not finite; save the adapter again")
    return values


class _Settings(NamedTuple):
    """Of adapter_config.json. targets: the last parts of target_parameters. Patterns: of the ends of modules' names,
    the first one that fits counts."""

    rank: int
    alpha: float
    rslora: bool
    transposed: bool
    targets: tuple[str, ...]
    ranks: list[tuple[re.Pattern[str], int]]
    alphas: list[tuple[re.Pattern[str], float]]

    def of(self, module: str) -> tuple[int, float]:
        """Rank and alpha of a module."""
        rank = next((value for pattern, value in self.ranks if pattern.match(module)), self.rank)
        return rank, next((value for pattern, value in self.alphas if pattern.match(module)), self.alpha)


def _settings(config: Mapping[str, Any]) -> _Settings:
    def patterns(name: str, read: Callable[..., Any]) -> list[tuple[re.Pattern[str], Any]]:
        of = section(config, name)
        try:
            return [(re.compile(rf"(.*\.)?({key})$"), read(of, key)) for key in of]
        except re.error as problem:
            raise ConfigError(
                f"{name}: {problem.pattern!r:.80} is no regular expression ({problem}); mend it"
            ) from problem

    return _Settings(
        whole(config, "r", 8), number(config, "lora_alpha", 8), switch(config, "use_rslora", False),
        switch(config, "fan_in_fan_out", False), _targets(config), patterns("rank_pattern", whole),
        patterns("alpha_pattern", number),
    )  # fmt: skip


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    found = tuple(name.rpartition(".")[2] for name in strings(config, "target_parameters"))
    if others := [name for name in found if name not in _OF_EXPERTS]:
        raise ConfigError(
            f"target_parameters has {others[0]!r:.80}; of parameters that are no modules the experts' "
            f"({', '.join(_OF_EXPERTS)}) can be used; merge it into the model with PEFT (merge_and_unload) and save "
            "that"
        )
    return found


def _stacked(modules: Iterable[str], targets: tuple[str, ...]) -> dict[str, str]:
    """Of modules those that change a tensor of all experts, with its name. PEFT wraps a module once for each of its
    tensors that are changed: the tensor after ".base_layer" stands before others."""
    wanted = [name for name in _OF_EXPERTS if name in targets]
    found: dict[str, list[str]] = {}
    for module in modules:
        if wanted and (owner := module.replace(".base_layer", "")).endswith(".experts"):
            found.setdefault(owner, []).append(module)
    return {
        module: f"{owner}.{name}"
        for owner, wrappers in found.items()
        for module, name in zip(sorted(wrappers, key=len, reverse=True), wanted[-len(wrappers) :], strict=False)
    }


def _pair(
    folder: Path, settings: _Settings, module: str, tensors: dict[str, TensorInfo], stacked: bool = False
) -> Pair:
    embedding = any(kind.startswith("lora_embedding") for kind in tensors)
    kinds = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if missing := [kind for kind in kinds if kind not in tensors]:
        raise ConfigError(f"{folder / TENSORS}: {module} has no {missing[0]}; save the adapter again")
    a, b = (tensors.pop(kind) for kind in kinds)
    magnitude, bias = tensors.pop("lora_magnitude_vector", None), tensors.pop("lora_B.bias", None)
    if tensors:
        raise ConfigError(f"{folder / TENSORS}: {module}.{min(tensors)} cannot be used; save the adapter again")
    if len(a.shape) != 2 or len(b.shape) != 2 or not 0 < a.shape[0] == b.shape[1]:
        raise ConfigError(
            f"{folder / TENSORS}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; they are matrices, "
            "the first dimension of one is the second of the other"
        )
    outputs = (b.shape[0],)
    for what, vector in (("lora_magnitude_vector", magnitude), ("lora_B.bias", bias)):
        if vector is not None and vector.shape != outputs:
            raise ConfigError(
                f"{folder / TENSORS}: {module}.{what} is {list(vector.shape)}, its lora_B has {b.shape[0]} outputs; "
                "save the adapter again"
            )
    rank = a.shape[0]
    said, alpha = settings.of(module)
    if stacked and rank % said == 0:
        rank = said
    elif said != rank:
        raise ConfigError(
            f"{folder / CONFIG}: r of {module} is {said}, its tensors have {rank}; save the adapter again"
        )
    scale = alpha / (math.sqrt(rank) if settings.rslora else rank)
    return Pair(a, b, scale, embedding, magnitude, bias, rank if stacked else 0)


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{folder / CONFIG}: peft_type is {kind!r:.80}; only LORA adapters can be used")
    for field in _OTHERS:
        if value := config.get(field):
            raise ConfigError(
                f"{folder / CONFIG}: {field} is {value!r:.80}, which is more than LoRA; merge it into the model with "
                "PEFT (merge_and_unload) and save that"
            )
    if (begun := config.get("init_lora_weights")) not in _BEGINNINGS:
        raise ConfigError(
            f"{folder / CONFIG}: init_lora_weights is {begun!r:.80}, which changes the base, too; save the adapter "
            "with path_initial_model_for_weight_conversion, which makes it one of the base as it is"
        )


def _missing(folder: Path, name: str) -> str:
    if name == TENSORS and (folder / "adapter_model.bin").exists():
        return (
            f"{folder}: the adapter is in adapter_model.bin, which can run code when it is read; save it again with "
            "safe_serialization=True"
        )
    return f"{folder / name} is not there; give the folder of a LoRA adapter in PEFT's format"
