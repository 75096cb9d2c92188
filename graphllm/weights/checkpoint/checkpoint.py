"""A Hugging Face checkpoint folder: which tensors it holds and where their bytes are. Only headers are read here.

safetensors files only: no format that can run code when it is opened (`graphllm.loading.checkpoint.conversion` turns
.bin files into them). They are parsed here and not by the safetensors library because the loader reads the bytes
straight into the parameters' memory, in file order, without a memory map.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from graphllm.config import ConfigError
from graphllm.config.fields import DRAFT as DRAFT  # also its graph's name, and before its tensors' names
from graphllm.config.fields import check_no_pointer, read_json, section
from graphllm.config.parameter import is_strings
from graphllm.weights.checkpoint.gguf.header import read_gguf
from graphllm.weights.checkpoint.gguf.tensors import tensors_of
from graphllm.weights.checkpoint.tensor_info import TensorInfo as TensorInfo
from graphllm.weights.checkpoint.tensor_info import WeightError as WeightError
from graphllm.weights.dtypes import DTYPES

MAIN = "main:"  # before the name of a parameter of the model that a draft model is tied to
FURTHER = re.compile(r"(model\.mtp_layers|(model\.)?mtp)\.")  # what the names of layers begin with that only draft
_SINGLE = "model.safetensors"
_INDEX = f"{_SINGLE}.index.json"
BIN = "pytorch_model.bin"
_FILES = {"auto": (_SINGLE, BIN), "safetensors": (_SINGLE,), "pt": (BIN,)}  # by load_format, the first ones first
_LOAD = "python -c \"import transformers as t; t.AutoModelForCausalLM.from_pretrained({}).save_pretrained('NEW')\""
_OLD = "convert it once: pip install 'transformers<5' {}; " + _LOAD
_STATE = (
    'convert it once: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('FILE', weights_only=True){}, 'model.safetensors')\""
)
# Formats that are not read, in the order in which they are looked for, and what to do about each.
_OTHERS = {
    "*.h5": _OLD.format("tensorflow", "'FOLDER', from_tf=True"),
    "*.msgpack": _OLD.format("flax", "'FOLDER', from_flax=True"),
    "*.ckpt.index": _OLD.format("tensorflow", "'FOLDER', from_tf=True"),
    "*.gguf": "a repository's GGUF files are not chosen from; `hf download NAME FILE` one, and give its path",
    "consolidated.*": "convert it once: python -m transformers.models.llama.convert_llama_weights_to_hf "
    "--input_dir FOLDER --output_dir NEW",
    "*.ckpt": _STATE.format("['state_dict']"),
    "*.pt": _STATE.format(""),
    "*.pth": _STATE.format(""),
    "pytorch_model*.bin": "leave out --load-format safetensors, and .bin files are read where there is nothing else",
    "*.bin": "rename it to pytorch_model.bin, if it holds the weights",
}
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # of a split GGUF file
_MAX_HEADER = 100_000_000  # the safetensors library's own limit

_BITS = {
    **{d.tag: 8 * d.itemsize for d in DTYPES.values()},
    "C64": 64,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,  # no dtype of a parameter, but there may be such tensors
}


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder. tensors: by name."""

    folder: Path
    tensors: Mapping[str, TensorInfo]

    @staticmethod
    def open(folder: str | Path) -> Checkpoint:
        """Read the headers of a folder's safetensors files. Raises WeightError naming each file that is no good."""
        folder = Path(folder)
        if not folder.is_dir():
            raise WeightError(folder, ["no such folder; give the folder of a checkpoint with config.json in it"])
        if (folder / _SINGLE).exists():
            return Checkpoint(folder, read_header(folder / _SINGLE))
        if (folder / _INDEX).exists():
            return Checkpoint(folder, _open_shards(folder))
        if (file := gguf_in(folder)) is not None:
            return Checkpoint(folder, tensors_of(read_gguf(file)))
        raise WeightError(folder, [no_weights(p.name for p in folder.iterdir())])


def draft_name(tensor: str) -> str:
    """The name of a draft model's tensor among the tensors of the model that it joins."""
    return f"{DRAFT}:{tensor}"


def weight_files(folder: Path, load_format: str = "auto") -> list[str]:
    """The files that a folder's weights are in, there or not: one, or those that an index names; none when it has
    neither. load_format: safetensors, pt (.bin files), or auto, which is the first of these that there is. Raises
    WeightError for a damaged index."""
    for single in _FILES.get(load_format, ()):
        if (folder / single).exists():
            return [single]
        if (folder / f"{single}.index.json").exists():
            return sorted(set(_weight_map(folder / f"{single}.index.json").values()))
    return []


def gguf_in(folder: Path) -> Path | None:
    """The only GGUF file of a folder, the first of a split one; None where there is none. Raises WeightError where
    there are several."""
    found = sorted(file for file in folder.glob("*.gguf") if not _LATER_PART.search(file.name))
    if len(found) > 1:
        raise WeightError(folder, [f"holds {len(found)} GGUF files; name one, such as {found[0]}"])
    return found[0] if found else None


def pick_weights(names: Iterable[str], load_format: str = "auto") -> list[str]:
    """Which of a repository's files its weights are in. Raises ConfigError when there are none that can be read."""
    names = list(names)
    for single in _FILES.get(load_format, ()):
        if single in names:
            return [single]
        if f"{single}.index.json" in names:
            shards = fnmatch.filter(names, "*" + single[single.index(".") :])
            return fnmatch.filter(shards, "*-of-*") or shards
    if load_format in _FILES:
        raise ConfigError(no_weights(names))
    return []


def no_weights(names: Iterable[str]) -> str:
    """What to say of a folder with these files and no weights that can be read."""
    names = sorted(names)
    for pattern, remedy in _OTHERS.items():
        if found := fnmatch.filter(names, pattern):
            return f"only {', '.join(found[:3])}, which cannot be read; {remedy}"
    return f"neither {_SINGLE} nor {_INDEX}; is it the folder of a checkpoint?"


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over names, dtypes and shapes: what an artifact depends on. The numbers themselves are not read."""
    rows = sorted((name, t.dtype, t.shape) for name, t in checkpoint.tensors.items())
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises ConfigError when the file is truncated or damaged."""
    check_no_pointer(file)
    with _opened(file) as f:
        size = os.fstat(f.fileno()).st_size
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MAX_HEADER:
            raise WeightError(file, ["not a safetensors file, or damaged: no header"])
        text = f.read(length)
    if len(text) < length:
        raise WeightError(file, [f"truncated: {size} bytes, its header has {8 + length}; download it again"])
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(file, 8 + length, fields) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise WeightError(file, [f"damaged header ({e!r:.200}); download it again"]) from e
    _check_layout(file, size, 8 + length, tensors)
    return tensors


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as failure:
        raise WeightError(file, [f"cannot be read ({failure.strerror}); put the checkpoint's file there"]) from failure


def _tensor(file: Path, base: int, fields: Any) -> TensorInfo:
    begin, end = fields["data_offsets"]
    dtype, shape = fields["dtype"], tuple(fields["shape"])
    numbers = (begin, end, *shape)
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers) or begin > end:
        raise ValueError(f"{dtype} {shape} at {begin}:{end}")
    bits = _BITS.get(dtype)  # a dtype of the future is refused when a parameter needs it, not here
    if bits is not None and (end - begin) * 8 != math.prod(shape) * bits:
        raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    return TensorInfo(file, dtype, shape, base + begin, end - begin)


def _check_layout(file: Path, size: int, base: int, tensors: Mapping[str, TensorInfo]) -> None:
    """The tensors fill the file exactly: no hole, no overlap, nothing after them."""
    at = base
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if t.offset != at:
            raise WeightError(file, [f"damaged: tensor {name} starts at byte {t.offset}, expected {at}"])
        at += t.nbytes
    if at > size:
        raise WeightError(file, [f"truncated: {size} bytes, its header says {at}; download it again"])
    if at < size:
        raise WeightError(file, [f"damaged: {size} bytes, its header says {at}; download it again"])


def _open_shards(folder: Path) -> dict[str, TensorInfo]:
    index = folder / _INDEX
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    there = {file.name for file in folder.iterdir() if file.is_file()}
    if missing := [f for f in files if f not in there]:
        raise WeightError(index, [f"names {f!r:.200}, which is not in the folder; download it" for f in missing])
    problems: list[str] = []
    shards: dict[str, dict[str, TensorInfo]] = {}
    for f in files:
        try:
            shards[f] = read_header(folder / f)
        except WeightError as e:
            problems += [f"{f}: {p}" for p in e.problems]
    if problems:
        raise WeightError(folder, problems)
    if lost := [(name, f) for name, f in weight_map.items() if name not in shards[f]]:
        raise WeightError(index, [f"says that {f} holds {name}, it does not" for name, f in lost])
    return {name: shards[f][name] for name, f in weight_map.items()}


def _weight_map(index: Path) -> Mapping[str, str]:
    """The file that each tensor is in."""
    weight_map = section(read_json(index) or {}, "weight_map", str(index))
    if not weight_map or not is_strings(tuple(weight_map.values())):
        raise WeightError(index, ["damaged: weight_map names no files; download it again"])
    if outside := [f for f in sorted(set(weight_map.values())) if Path(f).name != f]:
        raise WeightError(index, [f"names a file outside its folder: {f!r:.200}" for f in outside])
    return weight_map
