"""Baked weights with torch: an artifact's finished parameters are written to one file, which a start maps or copies in
place of making them again.

``weights.bin`` holds a page that says what it is, then every parameter from a page boundary on. ``baked.json`` says
where they are and which checkpoint they were made of (`graphllm.program.baked_table`).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from graphllm.config.setting import size_text
from graphllm.host.libraries import Libraries
from graphllm.program.baked_table import DATA, FORMAT, PAGE, TABLE, BakedError, check, stamp
from graphllm.weights.checkpoint.checkpoint import Checkpoint, fingerprint
from graphllm.weights.loading.baked_on_host import mapped, sample
from graphllm.weights.loading.loader import begin_tensors, load_weights
from graphllm.weights.loading.readers import Loading
from graphllm.weights.plan.plan import WeightPlan

_HUGE = 2 << 20  # written at once, so that the operating system can keep and map it as one page


def bake(artifact: Path, checkpoint: Checkpoint, libraries: Libraries | None = None) -> None:
    """Make the parameters of an artifact that is being built, by its weight plan, and add them to it. libraries: see
    `load_weights`.

    Raises WeightError when the checkpoint does not fit the plan, BakedError when the disk is full.
    """
    plan = WeightPlan.from_json((artifact / "weights.json").read_text())
    tensors = load_weights(plan, checkpoint, "cpu", libraries=libraries)
    places, size = _lay_out(tensors)
    try:
        digest = _write(artifact / DATA, places, tensors, size)
        table = {
            "format": FORMAT,
            "checkpoint": fingerprint(checkpoint),
            "sample": sample(checkpoint),
            "size": size,
            "sha256": digest,
            "tensors": places,
        }
        (artifact / TABLE).write_text(json.dumps(table, indent=1))
        with (artifact / DATA).open("r+b") as file:
            file.write(stamp(table))
    except OSError as full:
        raise BakedError(
            f"bake_weights: {artifact / DATA} needs {size_text(size)} and cannot be written ({full.strerror}); make "
            "room there, or leave --bake-weights out"
        ) from full


def _lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """Where each parameter goes, those that share their memory to one place; and the size of the file."""
    places: dict[str, dict[str, Any]] = {}
    taken: dict[tuple[int, tuple[int, ...], torch.dtype], int] = {}
    end = PAGE
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        same = (tensor.data_ptr() or id(tensor), shape, tensor.dtype)
        if same not in taken:
            taken[same] = end
            end += -(-tensor.nbytes // PAGE) * PAGE
        dtype = str(tensor.dtype).removeprefix("torch.")
        places[name] = {"dtype": dtype, "shape": shape, "offset": taken[same], "nbytes": tensor.nbytes}
    return places, end


def _write(file: Path, places: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, torch.Tensor], size: int) -> str:
    """Write the parameters; SHA-256 of everything after the first page."""
    digest, at = hashlib.sha256(), PAGE
    window = memoryview(bytearray(_HUGE))  # of the file, from a multiple of it on
    with file.open("wb") as out:
        os.posix_fallocate(out.fileno(), 0, size)  # a full disk is found out before hours of writing
        for name, place in places.items():
            if place["offset"] < at:
                continue  # shares the memory of one that is there
            data = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
            for part in (data, memoryview(bytes(-len(data) % PAGE))):
                digest.update(part)
                done = 0
                while done < len(part):
                    start = at % _HUGE
                    count = min(len(part) - done, _HUGE - start)
                    window[start : start + count] = part[done : done + count]
                    done, at = done + count, at + count
                    if at % _HUGE == 0:
                        out.write(window)
        out.write(window[: at % _HUGE])
    return digest.hexdigest()


def begin_weights(artifact: Path, device: torch.device, into: Mapping[str, torch.Tensor] | None = None) -> Loading:
    """Copies of the parameters on a GPU, as `loader.begin_weights` gives them. Parameters that share memory do so here.
    into: memory to fill, of some of them; None: it is allocated. Raises BakedError as `check` does."""
    places = check(artifact)["tensors"]
    if into is None:
        made = {p["offset"]: torch.zeros(p["shape"], dtype=getattr(torch, p["dtype"]), device=device)
                for p in places.values()}  # fmt: skip
        into = {name: made[p["offset"]] for name, p in places.items()}
    tensors = {name: into[name] for name in places if name in into}
    return begin_tensors(artifact / DATA, tensors, {name: p["offset"] for name, p in places.items()})


def open_weights(artifact: Path) -> dict[str, torch.Tensor]:
    """The parameters by name on a CPU: the file itself, mapped for reading only and shared with other processes.
    Parameters that share memory do so here. Raises BakedError as `check` does."""
    table = check(artifact)
    memory = mapped(artifact)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nor shall it be
        whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map open
    return dict(_views(whole, table["tensors"]))


def _views(whole: torch.Tensor, places: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, p in places.items():
        yield name, whole[p["offset"] : p["offset"] + p["nbytes"]].view(getattr(torch, p["dtype"])).view(p["shape"])
