"""The tensors of a GGUF file by the names of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from graphllm.weights.checkpoint.gguf.facts import LAYER, Facts
from graphllm.weights.checkpoint.gguf.families import family_of
from graphllm.weights.checkpoint.gguf.family import Family
from graphllm.weights.checkpoint.gguf.header import Gguf, Tensor
from graphllm.weights.checkpoint.gguf.rotary import FACTORS
from graphllm.weights.checkpoint.tensor_info import TensorInfo

_TAGS = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def tensors_of(file: Gguf) -> dict[str, TensorInfo]:
    """Where the tensors of a checkpoint are, by their names in one. Encoded ones are bytes, one of a stack of experts
    is a stretch of the stack. Raises WeightError for a tensor that has no place."""
    return {
        name: TensorInfo(tensor.file, *_stored(tensor, encoding), tensor.offset, tensor.nbytes)
        for name, tensor, encoding in _named(file)
    }


def types_of(file: Gguf) -> dict[str, str]:
    """The encodings of modules, without "gguf_"."""
    return {name.removesuffix(".weight"): encoding for name, _, encoding in _named(file) if encoding is not None}


def _stored(tensor: Tensor, encoding: str | None) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and shape."""
    if encoding is None:
        return _TAGS[tensor.kind.name], tensor.shape
    return "U8", (*tensor.shape[:-1], tensor.shape[-1] // tensor.kind.entries * tensor.kind.nbytes)


def _named(file: Gguf) -> Iterator[tuple[str, Tensor, str | None]]:
    """The tensors by a checkpoint's names, each with its encoding, None for plain numbers."""
    facts, family = family_of(file)
    for own, tensor in file.tensors.items():
        found = LAYER.fullmatch(own)
        if own in FACTORS or (found is not None and int(found[1]) >= facts.layers):
            continue  # numbers of the config, and layers that only draft
        names = _names_of(own if found is None else f"blk.{found[2]}", facts, family, own)
        if found is not None:
            names = tuple(name.replace("{layer}", found[1]) for name in names)
        encoding = _encoding(found[2] if found else own, tensor, facts, family)
        if "{expert}" in names[0]:
            yield from ((name, part, encoding) for name, part in _stretches(names, tensor, own, facts))
        else:
            yield names[0], tensor, encoding


def _names_of(key: str, facts: Facts, family: Family, own: str) -> tuple[str, ...]:
    """A checkpoint's names of a tensor, with "{layer}" and "{expert}"."""
    stem, _, leaf = key.rpartition(".")
    named = family.names.get(key)
    if named is None and stem in family.names:
        named = family.names[stem]
        named = tuple(f"{name}.{leaf}" for name in ((named,) if isinstance(named, str) else named))
    if named is None:
        raise facts.bad(f"tensor {own} is not one of {family.architecture}; use the model's safetensors")
    return (named,) if isinstance(named, str) else named


def _encoding(key: str, tensor: Tensor, facts: Facts, family: Family) -> str | None:
    kind, (stem, _, leaf) = tensor.kind.name, key.rpartition(".")
    if stem in family.interleaved and leaf == "weight":
        return f"{kind}-{facts.head_dim()}"
    return None if kind in _TAGS else kind


def _stretches(names: tuple[str, ...], stack: Tensor, own: str, facts: Facts) -> Iterator[tuple[str, Tensor]]:
    """Each expert's matrices of a stack [experts, rows, inner]."""
    if len(stack.shape) != 3 or stack.shape[1] % len(names):
        raise facts.bad(f"tensor {own} has the shape {stack.shape}, no stack of {len(names)}; convert the model again")
    count, rows, inner = stack.shape
    part = stack._replace(shape=(rows // len(names), inner))
    for i in range(count * len(names)):
        name = names[i % len(names)].replace("{expert}", str(i // len(names)))
        yield name, part._replace(offset=stack.offset + i * part.nbytes)
