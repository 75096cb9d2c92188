"""Where the states of a model lie: cache groups over one pool of equal blocks, the recurrent states of a sequence side
by side, and one tensor for each other state.

Layers with the same retention and bytes a token form groups of equal size. A group's layers use the same blocks, and
layers of different groups use the same tensors, in different blocks of them. The group with the most bytes a token has
the configured block size; the others have the largest power-of-two multiple of it that fits into as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.program.schema import CacheGroup
from graphllm.program.specs import BLOCK_TOKENS, StateSpec

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8,
            "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}  # fmt: skip


class BlockPlan(NamedTuple):
    """The pool and who uses which part of it.

    groups: by their number.
    places: (group, tensor) of each layer, None for one without block states.
    tensors: how many there are.
    block_bytes: of one block in one tensor.
    unused: bytes of such a block that each group leaves unused.
    """

    groups: tuple[CacheGroup, ...]
    places: tuple[tuple[int, int] | None, ...]
    tensors: int
    block_bytes: int
    unused: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        """Of one block in all tensors."""
        return self.tensors * self.block_bytes


class StatePlace(NamedTuple):
    """A state in memory.

    shape: without the first dimension.
    stride: in elements, the first dimension's included.
    tensor: number in the pool, -1 for a state elsewhere.
    offset: elements, in the pool's tensor, in the memory of recurrent states or in that of snapshots.
    int8_over: see `StateSpec`.
    """

    axis: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    retention: str
    tensor: int = -1
    offset: int = 0
    int8_over: int = 0

    @property
    def counted(self) -> str:
        """The name of the number of its entries in `Layout.entries`."""
        return "recurrent" if self.axis == "slot" and self.retention == "last" else self.axis


def plan_blocks(layers: Sequence[Sequence[StateSpec]], block_size: int, max_len: int) -> BlockPlan:
    """Groups over layers with those states; only block states count. Raises ConfigError where a layer's states
    contradict each other, which is a mistake in the model file."""
    kinds = [_kind([s for s in states if s.axis == "block"], max_len) for states in layers]
    found = sorted({k for k in kinds if k is not None}, key=lambda k: (k[0], -k[1]))
    if not found:
        return BlockPlan((), (None,) * len(layers), 0, 0, ())
    members = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in found}
    size = min(map(len, members.values()))
    heaviest = max(token_bytes for _, token_bytes in found)
    align = max(ITEMSIZE[s.dtype] for states in layers for s in states if s.axis == "block")
    block_bytes = -(-heaviest * block_size // align) * align
    groups: list[CacheGroup] = []
    unused: list[int] = []
    places: list[tuple[int, int] | None] = [None] * len(layers)
    for (window, token_bytes), indices in members.items():
        tokens = block_size
        while 2 * tokens * token_bytes <= block_bytes and tokens < max_len:
            tokens *= 2
        for start in range(0, len(indices), size):
            for tensor, layer in enumerate(indices[start : start + size]):
                places[layer] = (len(groups), tensor)
            groups.append(CacheGroup("window" if window else "full", window, tokens))
            unused.append(block_bytes - tokens * token_bytes)
    return BlockPlan(tuple(groups), tuple(places), size, block_bytes, tuple(unused))


def _kind(states: Sequence[StateSpec], max_len: int) -> tuple[int, int] | None:
    """Window (0 for all) and bytes a token of a layer's block states."""
    if not states:
        return None
    windows = {0 if s.retention == "full" or s.window >= max_len else s.window for s in states}
    if len(windows) > 1 or any(s.retention not in ("full", "window") for s in states):
        given = ", ".join(f"{s.name} {s.retention} {s.window}" for s in states)
        raise ConfigError(f"block states of one layer must have one retention, full or window, not {given}")
    if any(s.shape.count(BLOCK_TOKENS) != 1 for s in states):
        raise ConfigError(f"block states need the dimension {BLOCK_TOKENS!r} once: {[s.shape for s in states]}")
    return windows.pop(), sum(_token_bytes(s) for s in states)


def _token_bytes(state: StateSpec) -> int:
    return ITEMSIZE[state.dtype] * math.prod(d for d in state.shape if isinstance(d, int))


def layer_places(states: Sequence[StateSpec], plan: BlockPlan, layer: int, versions: int) -> dict[str, StatePlace]:
    """Where a layer's states lie. versions: of recurrent states, see `slot_shape`."""
    places, offset = {}, 0
    for s in sorted(states, key=lambda s: -ITEMSIZE[s.dtype]):  # so that each one is aligned without padding
        if s.axis != "block":
            places[s.name] = own_place(s, versions)
            continue
        place = plan.places[layer]
        assert place is not None
        group, tensor = place
        shape = tuple(plan.groups[group].block_size if d == BLOCK_TOKENS else int(d) for d in s.shape)
        item = ITEMSIZE[s.dtype]
        stride = (plan.block_bytes // item, *dense(shape))
        places[s.name] = StatePlace("block", s.dtype, shape, stride, s.retention, tensor, offset // item)
        offset += item * math.prod(shape)
    return places


def own_place(state: StateSpec, versions: int = 1) -> StatePlace:
    """Of a state with memory of its own."""
    shape = slot_shape(state, versions)
    stride = (math.prod(shape), *dense(shape))
    return StatePlace(state.axis, state.dtype, shape, stride, state.retention, int8_over=state.int8_over)


def side_by_side(places: Mapping[str, StatePlace]) -> tuple[dict[str, StatePlace], int]:
    """Recurrent states in one memory [slots, versions, bytes], so that a slot is zeroed and copied at once,
    however many layers have states. Those that snapshots may have in 8 bits come first, equal ones one after another.
    Returns all places, and the bytes of a version."""
    last = [(name, place) for name, place in places.items() if place.retention == "last"]
    own = dict(sorted(last, key=lambda item: kind_in_snapshots(item[1])))
    offsets, end = dict[str, int](), 0
    for name, place in own.items():
        offsets[name] = end
        end += -(-math.prod(place.shape[1:]) * ITEMSIZE[place.dtype] // _STATE_ALIGN) * _STATE_ALIGN
    size = -(-end // _VERSION_ALIGN) * _VERSION_ALIGN
    found = dict(places)
    for name, place in own.items():
        item, (versions, *shape) = ITEMSIZE[place.dtype], place.shape
        stride = (versions * size // item, size // item, *dense(shape))
        found[name] = place._replace(stride=stride, offset=offsets[name] // item)
    return found, size


_STATE_ALIGN, _VERSION_ALIGN = 16, 256  # bytes


def kind_in_snapshots(place: StatePlace) -> tuple[Any, ...]:
    """What states of one kind have in common, for sorting: they lie one after another in a slot."""
    return place.int8_over == 0, *((place.dtype, place.shape, place.int8_over) if place.int8_over else ())


def slot_shape(state: StateSpec, versions: int) -> tuple[int, ...]:
    """The shape of one entry: recurrent slot states have a dimension of versions in front, for roll-back."""
    shape = tuple(int(d) for d in state.shape)
    return (versions, *shape) if state.retention == "last" and state.axis == "slot" else shape


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    stride = [1]
    for d in shape[:0:-1]:
        stride.append(stride[-1] * d)
    return tuple(reversed(stride)) if shape else ()


def place_bytes(place: StatePlace, count: int) -> int:
    """Memory of a state with ``count`` entries and memory of its own."""
    return count * math.prod(place.shape) * ITEMSIZE[place.dtype]
