"""LoRA adapters are merged into a checkpoint, tensor by tensor: one is held, and what its change needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import read_json
from graphllm.quantize.output import Output
from graphllm.weights.adapters.adapter_files import Adapter, Pair, open_adapter, read_tensor
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.checkpoint.tensor_info import TensorInfo
from graphllm.weights.dtypes import BY_TAG, PLAIN

_ENTRIES = 1 << 22  # of a matrix that are computed together
_HEADS = ("lm_head", "embed_out")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


class Merged(NamedTuple):
    """What was merged.

    tensors: tensors that differ from the base's.
    nbytes: bytes of all tensors.
    """

    tensors: int
    nbytes: int


@dataclass
class _Change:
    """What happens to one tensor of the base: it is replaced, gets sums of low rank, or a vector is added."""

    whole: tuple[Adapter, TensorInfo] | None = None
    pairs: tuple[tuple[Adapter, str, Pair, float], ...] = ()
    added: tuple[tuple[TensorInfo, float], ...] = ()


def merge(
    folder: Path, checkpoint: Checkpoint, adapters: Sequence[tuple[Path, float]], output: Path, dtype: str | None = None
) -> Merged:
    """Write a checkpoint in which the adapters, each times its weight, are part of the model.

    Numbers are computed in float32 and rounded once, to the base's dtypes or the one given. The rest of the folder is
    copied. Raises ConfigError, naming what, value and remedy, before anything is written, but for numbers that are
    not finite.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"model: {folder} has no config.json; give the folder of a checkpoint")
    _check_plain(folder, config, checkpoint)
    if dtype is not None and dtype not in PLAIN:
        raise ConfigError(f"dtype is {dtype!r:.80}: give one of {', '.join(PLAIN)}")
    opened = [(open_adapter(path), weight) for path, weight in adapters]
    changes = _changes(opened, checkpoint, config)
    if dtype is not None:
        config = {n: v for n, v in config.items() if n != "torch_dtype"} | {"dtype": dtype}
    in_order = sorted(checkpoint.tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    with Output(output) as out:
        for name, info in in_order:
            values = _read(info, name)
            kind = values.dtype if dtype is None or not values.is_floating_point() else getattr(torch, dtype)
            change = changes.get(name)
            values = values.to(kind) if change is None else _changed(values, name, change, kind)
            if (
                (name in changes or dtype is not None)
                and values.is_floating_point()
                and not torch.isfinite(values).all()
            ):
                raise ConfigError(
                    f"{output}: {name} would have numbers beyond {str(values.dtype).removeprefix('torch.')}; give "
                    "--dtype bfloat16"
                )
            out.add({name: values})
        return Merged(len(changes), out.finish(folder, config))


def _check_plain(folder: Path, config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    method = config.get("quantization_config")
    strange = [n for n, t in checkpoint.tensors.items() if t.dtype not in BY_TAG]
    if method or strange:
        name = method.get("quant_method", "some method") if isinstance(method, Mapping) else f"format of {strange[:1]}"
        raise ConfigError(
            f"model: {folder} is quantized ({name}); merge into the checkpoint that it was made from, and quantize "
            "what comes out (graphllm quantize)"
        )


def _changes(
    adapters: Sequence[tuple[Adapter, float]], checkpoint: Checkpoint, config: Mapping[str, Any]
) -> dict[str, _Change]:
    """By the base's names of tensors. Raises ConfigError for what the base does not have, or has in other shapes."""
    changes: dict[str, _Change] = {}
    for adapter, weight in adapters:
        for module, pair in adapter.pairs.items():
            if pair.rank_of_each:
                raise ConfigError(
                    f"{adapter.file}: {module} is of all experts at once, which is not merged here; serve it with "
                    "--enable-lora, or merge it with PEFT (merge_and_unload) and save that"
                )
            name = _in_base(adapter, f"{module}.weight", checkpoint)
            _check_shape(adapter, name, pair, checkpoint.tensors[name])
            change = changes.setdefault(name, _Change())
            change.pairs += ((adapter, name, pair, weight),)
            if pair.magnitude is not None and weight != 1:
                raise _not_addable(adapter, name)
            if pair.bias is not None:
                bias = _in_base(adapter, f"{module}.bias", checkpoint)
                _check_equal(adapter, bias, pair.bias.shape, checkpoint.tensors[bias].shape)
                changes.setdefault(bias, _Change()).added += ((pair.bias, pair.scale * weight),)
        for given, info in adapter.saved.items():
            name = _in_base(adapter, given, checkpoint)
            _check_equal(adapter, name, info.shape, checkpoint.tensors[name].shape)
            change = changes.setdefault(name, _Change())
            # PEFT saves the matrix of an adapted embedding or head with the adapter: it is the base's own.
            if (change.whole is not None or weight != 1) and not any(a is adapter for a, *_ in change.pairs):
                raise _not_addable(adapter, name)
            change.whole = (adapter, info)
    for name, change in changes.items():
        if len(change.pairs) > 1 and any(pair.magnitude for _, _, pair, _ in change.pairs):
            raise _not_addable(change.pairs[0][0], name)
    _check_ties(changes, checkpoint, config)
    return changes


def _not_addable(adapter: Adapter, name: str) -> ConfigError:
    return ConfigError(
        f"{adapter.file}: what it says of {name} is no sum (DoRA, or the whole tensor), and cannot be weighted or "
        "added to another adapter's; merge this adapter by itself"
    )


def _in_base(adapter: Adapter, name: str, checkpoint: Checkpoint) -> str:
    """The base's name of a tensor: some checkpoints leave out the name of the model within the one with a head."""
    if name in checkpoint.tensors:
        return name
    short = name.partition(".")[2]
    if short in checkpoint.tensors and short.count("."):
        return short
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in _HEADS:
        raise _tied(adapter, name)
    if kind == "bias" and f"{module}.weight" in checkpoint.tensors:
        raise ConfigError(f"{adapter.file}: {module} has a bias, and the base has none there; merge it with PEFT")
    known = sorted({n.rpartition(".")[0].rpartition(".")[2] for n in checkpoint.tensors})
    raise ConfigError(
        f"{adapter.file}: the base has no {name}; give the checkpoint that the adapter was made for (its modules are "
        f"{', '.join(known)})"
    )


def _check_shape(adapter: Adapter, name: str, pair: Pair, base: TensorInfo) -> None:
    if BY_TAG[base.dtype].name not in PLAIN:
        raise ConfigError(f"model: {name} is quantized ({base.dtype}); merge into the checkpoint that it was made from")
    outputs, inputs = pair.b.shape[0], pair.a.shape[1]
    wanted = (inputs, outputs) if pair.embedding or adapter.transposed else (outputs, inputs)
    if base.shape != wanted:
        raise ConfigError(
            f"{adapter.file}: {name.removesuffix('.weight')} is for a matrix of {list(wanted)}, the base's is "
            f"{list(base.shape)}; give the checkpoint that the adapter was made for"
        )


def _check_equal(adapter: Adapter, name: str, shape: tuple[int, ...], base: tuple[int, ...]) -> None:
    if shape != base:
        raise ConfigError(
            f"{adapter.file}: {name} is {list(shape)}, the base's is {list(base)}; give the checkpoint that the "
            "adapter was made for, resized as it was then"
        )


def _check_ties(changes: Mapping[str, _Change], checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Embedding and head are one matrix where the config says so, and where there is no tensor of a head."""
    text = config.get("text_config")
    said = (text if isinstance(text, Mapping) else config).get("tie_word_embeddings", config.get("tie_word_embeddings"))
    has_head = any(n.removesuffix(".weight").rpartition(".")[2] in _HEADS for n in checkpoint.tensors)
    if not (said or (said is None and not has_head)):
        return
    for name, change in changes.items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        if last in (*_HEADS, *_EMBEDDINGS):
            adapter = change.pairs[0][0] if change.pairs else change.whole[0]  # type: ignore[index]
            raise _tied(adapter, name)


def _tied(adapter: Adapter, name: str) -> ConfigError:
    return ConfigError(
        f"{adapter.file}: {name} is tied to the other end of the model in the base, and the adapter changes one of the "
        "two; save the base with tie_word_embeddings false and both tensors, and merge into that"
    )


def _read(info: TensorInfo, name: str) -> Tensor:
    """A tensor of the base as it is."""
    with info.file.open("rb") as file:
        file.seek(info.offset)
        data = bytearray(file.read(info.nbytes))
    if len(data) != info.nbytes:
        raise ConfigError(f"{info.file}: it ends within {name}; download it again")
    dtype = getattr(torch, BY_TAG[info.dtype].name)
    return torch.frombuffer(data, dtype=dtype).view(info.shape) if data else torch.empty(info.shape, dtype=dtype)


def _changed(values: Tensor, name: str, change: _Change, dtype: torch.dtype) -> Tensor:
    """What becomes of a tensor, rounded to the dtype."""
    if change.whole is not None:
        values = read_tensor(change.whole[1], name)
    if change.added:
        values = values.double()
        for info, weight in change.added:
            values += weight * read_tensor(info, name)
    if not change.pairs:
        return values.to(dtype)
    made = torch.empty(values.shape, dtype=dtype)
    if change.pairs[0][0].transposed or change.pairs[0][2].embedding:
        _add(made.T, values.T, name, change)
    else:
        _add(made, values, name, change)
    return made


def _add(made_OI: Tensor, values_OI: Tensor, name: str, change: _Change) -> None:
    """Write a matrix and the sums of low rank, some rows at a time."""
    wide = torch.promote_types(torch.promote_types(values_OI.dtype, made_OI.dtype), torch.float32)
    factors = []
    for _, _, pair, weight in change.pairs:
        a, b = read_tensor(pair.a, name).to(wide), read_tensor(pair.b, name).to(wide)
        magnitude = None if pair.magnitude is None else read_tensor(pair.magnitude, name).to(wide)
        factors.append((a, b * (pair.scale * weight), magnitude))
    step = max(1, _ENTRIES // values_OI.shape[1])
    for start in range(0, len(values_OI), step):
        rows = slice(start, start + step)
        sums = values_OI[rows].to(wide)
        for a, b, magnitude in factors:
            sums = sums + b[rows] @ a
            if magnitude is not None:  # of DoRA: rows keep their direction and get this length
                sums *= (magnitude[rows] / torch.linalg.norm(sums, dim=1))[:, None]
        made_OI[rows] = sums.to(made_OI.dtype)
