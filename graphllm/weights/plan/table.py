"""How an artifact keeps its weights, for people: as what, in how many bits, and in which layers. No torch."""

from __future__ import annotations

import math
import re
from typing import Any

from graphllm.weights.plan.expr import Decode, Encode, Rounded, walk
from graphllm.weights.plan.plan import Entry, WeightPlan


def table(plan: WeightPlan) -> list[dict[str, Any]]:
    """Every weight with more than one dimension, layers with the same together. name: with * for the layer's number.
    layers: their numbers, [] for what is in none. kept: the encoding, or the dtype. stored: its encodings in the
    checkpoint, if any. bits: of one number, with scales and padding."""
    rows: dict[tuple[str, str, str, float], list[int]] = {}
    for name, entries in _weights(plan).items():
        first = entries[0]
        encode = next((e for e in walk(first.expr) if isinstance(e, Encode)), None)
        numbers = math.prod(first.shape)
        if encode is not None:
            count = first.shape[0] if first.expert_axis is not None else 1
            numbers = count * math.prod(encode.matrix.shape)
        stored = ", ".join(dict.fromkeys(e.encoding for e in walk(first.expr) if isinstance(e, Decode)))
        bits = round(8 * sum(e.nbytes for e in entries) / numbers, 2)
        found = re.fullmatch(r"(.*)layers\.(\d+)\.(.*)", name)
        short = name if found is None else f"{found[1]}layers.*.{found[3]}"
        kept = first.dtype if encode is None else encode.encoding
        if (rounded := next((e for e in walk(first.expr) if isinstance(e, Rounded)), None)) is not None:
            kept = f"{first.dtype} of {rounded.encoding}"
        rows.setdefault((short, kept, stored, bits), []).extend([int(found[2])] if found else [])
    return [
        {"name": name, "layers": layers, "kept": kept, "stored": stored, "bits": bits}
        for (name, kept, stored, bits), layers in rows.items()
    ]


def _weights(plan: WeightPlan) -> dict[str, list[Entry]]:
    """The entries of each matrix, several where it is kept in parts."""
    found: dict[str, list[Entry]] = {}
    for entry in plan:
        encode = next((e for e in walk(entry.expr) if isinstance(e, Encode)), None)
        if encode is not None or (len(entry.shape) > 1 and entry.tie is None):
            name = entry.name if encode is None else entry.name.removesuffix(f".{encode.part}")
            found.setdefault(name, []).append(entry)
    return found
