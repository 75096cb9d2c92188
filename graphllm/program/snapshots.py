"""Where a snapshot in 8 bits has what: the memory that programs of the task "snapshots" read and write.

States of one kind lie one after another in a slot (`graphllm.program.states.side_by_side`), so one view shows all of
them. A snapshot has their codes, then their scales, then all other recurrent states as they are. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from graphllm.program.states import ITEMSIZE, StatePlace, dense, kind_in_snapshots

PREFIX = "state.snapshots."  # of the names of places in programs
_ALIGN, _SNAPSHOT_ALIGN = 16, 256  # bytes
_WORD = ITEMSIZE["int32"]


def plan_snapshots(places: Mapping[str, StatePlace], slot_bytes: int) -> tuple[dict[str, StatePlace], int]:
    """Views of slots and of snapshots for each kind i of states that may have 8 bits, and the bytes of a snapshot.

    i.states: [slots, versions, L, H, R, C]: L states, of which R numbers each share a scale.
    i.rest: [slots, versions, words] int32: for the first kind all other recurrent states, else nothing.
    i.codes, i.scales, i.kept: [snapshots, L, H, R, C] int8, [snapshots, L, H, C] float32 and [snapshots, words] int32.

    places: with recurrent states side by side. slot_bytes: of a version of a slot. Nothing, and 0 bytes, where no state
    may have 8 bits.
    """
    found, end, at = dict[str, StatePlace](), 0, 0
    scaled = sorted((p for p in places.values() if p.retention == "last" and p.int8_over), key=_first_byte)
    for number, (_, group) in enumerate(itertools.groupby(scaled, key=kind_in_snapshots)):
        members = list(group)
        first, item = members[0], ITEMSIZE[members[0].dtype]
        versions, *shape = first.shape
        axis = len(shape) + first.int8_over
        outer, shared, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        each = members[1].offset - first.offset if len(members) > 1 else math.prod(shape)
        assert [m.offset for m in members] == [first.offset + n * each for n in range(len(members))]
        inside, count = (outer, shared, inner), len(members)
        stride = (*first.stride[:2], each, *dense(inside))
        name = f"{PREFIX}{number}."
        found[name + "states"] = StatePlace(
            "slot", first.dtype, (versions, count, *inside), stride, "last", offset=first.offset
        )
        end = _aligned((first.offset + (count - 1) * each + math.prod(shape)) * item)
        for part, dtype, dims in (("codes", "int8", inside), ("scales", "float32", (outer, inner))):
            size = ITEMSIZE[dtype]
            found[name + part] = StatePlace(
                "snapshot", dtype, (count, *dims), (0, *dense((count, *dims))), "last", offset=at // size
            )
            at = _aligned(at + count * math.prod(dims) * size)
    words = (slot_bytes - end) // _WORD
    kinds = len(found) // 3
    total = -(-(at + words * _WORD) // _SNAPSHOT_ALIGN) * _SNAPSHOT_ALIGN if kinds else 0
    for number in range(kinds):
        name, width = f"{PREFIX}{number}.", 0 if number else words
        versions, *_ = found[name + "states"].shape
        stride = (versions * slot_bytes // _WORD, slot_bytes // _WORD, 1)
        found[name + "rest"] = StatePlace("slot", "int32", (versions, width), stride, "last", offset=end // _WORD)
        found[name + "kept"] = StatePlace("snapshot", "int32", (width,), (0, 1), "last", offset=at // _WORD)
    for name, place in found.items():
        if place.axis == "snapshot":
            found[name] = place._replace(stride=(total // ITEMSIZE[place.dtype], *place.stride[1:]))
    return found, total


def _first_byte(place: StatePlace) -> int:
    return place.offset * ITEMSIZE[place.dtype]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
