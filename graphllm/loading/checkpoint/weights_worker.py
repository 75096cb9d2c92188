"""The process that turns .bin files into safetensors: ``python -m`` this, a folder to write to, the files, and after
them the index of several, which names the file that a tensor is taken from.

It reads tensors only (`torch.load` with weights_only), one file at a time through a memory map, and writes them one
after the other, so that it needs memory for one of them. What is wrong goes to stdout, with status 1.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from graphllm.engine.process.limited_process import limit_memory, limit_time
from graphllm.weights.dtypes import DTYPES

_MEMORY = 1 << 30  # bytes of memory, in addition to the files
_SLOW = 20 << 20  # bytes in a second of the CPU


def main() -> None:
    """Convert all files."""
    target, files = Path(sys.argv[1]), [Path(file) for file in sys.argv[2:]]
    # A map takes address space only; an old file without one is read whole.
    limit_memory(_MEMORY + 2 * max(file.stat().st_size for file in files))
    limit_time(30 + sum(file.stat().st_size for file in files) // _SLOW)
    convert(target, files)


def convert(target: Path, files: list[Path]) -> None:
    """Write the tensors of .bin files, and an index of them. The last file may be theirs."""
    wanted = None
    if files[-1].suffix == ".json":
        *files, index = files
        wanted = json.loads(index.read_text())["weight_map"]
    weight_map = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        try:
            found = _convert(file, target / name)
        except Exception as wrong:
            raise ValueError(f"{file.name}: {wrong or type(wrong).__name__}") from wrong
        own = found if wanted is None else [tensor for tensor, of in wanted.items() if of == file.name]
        if lost := [tensor for tensor in own if tensor not in found]:
            raise ValueError(f"{index.name} says that {file.name} holds {lost[0]}, it does not")
        weight_map.update(dict.fromkeys(own, name))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _convert(file: Path, target: Path) -> Mapping[str, torch.Tensor]:
    """Write the tensors of one file; them."""
    found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"holds a {type(found).__name__}, and no tensors by name")
    header, at = {}, 0
    for name, tensor in found.items():
        dtype = DTYPES.get(str(getattr(tensor, "dtype", "")).removeprefix("torch."))
        if not isinstance(name, str) or dtype is None or tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"holds something else than tensors by name: {name!r:.80}")
        size = tensor.numel() * dtype.itemsize
        header[name] = {"dtype": dtype.tag, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in found.values():
            out.write(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))
        out.flush()
        os.fsync(out.fileno())
    return found


if __name__ == "__main__":
    try:
        main()
    except Exception as wrong:  # of torch, of the disk, of what is in the file
        print(" ".join(str(wrong).split())[:300] or type(wrong).__name__)
        sys.exit(1)
