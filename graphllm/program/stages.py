"""A program in stages: consecutive layers, each stage on a rank of its own, which has the weights and states of these
layers only.

Nothing of this is compiled: a program is a list of calls, and a stage makes only some of them. After its last call, a
stage sends the values that are still to be read to the next stage. After the last layer, the last stage sends the
logits to all. Every stage runs what follows, such as sampling, and so knows the tokens of the next step. Values keep
their places in the memory plan. All that is read after the layers comes from the last stage. So the other stages need
nothing that their layers made, and may run a later step's layers first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphllm.config import ConfigError
from graphllm.program.artifact import Artifact
from graphllm.program.expr import value
from graphllm.program.linking import LinkedProgram, PieceCall
from graphllm.program.program import Program
from graphllm.program.states import ITEMSIZE, StatePlace

COPIES = 3  # of messages that a stage sends: the newest, and those before that nobody may have taken yet
MESSAGE_ALIGN = 16  # values lie in a message at multiples of this many bytes
BEHIND = "behind layers"  # the part of a program in which a stage but the last gets the logits, and what follows them
_OF_LAYER = re.compile(r"(?:state\.)?layers\.(\d+)\.")
_GEOMETRY = ("empty", "view", "zeroed", "exchange")  # instructions of a piece that run nothing


class Stage(NamedTuple):
    """One of ``total``, from 0."""

    number: int
    total: int


def stage_reads(program: Program, stage: Stage) -> frozenset[str]:
    """The weights and states that a stage reads. Raises ConfigError for a program that cannot be divided."""
    if {"draft", "encode"} & {graph.task for graph in program.graphs}:
        raise ConfigError(
            f"pipeline_parallel_size is {stage.total}: a model with a draft graph or an encoder has no stages; use 1"
        )
    found: set[str] = set()
    for order in program.graphs[0].programs.values():
        inputs = [call.inputs for call in order.calls]
        for names, owner in zip(inputs, _owners(inputs, stage.total), strict=True):
            if owner in (stage.number, None):
                found.update(names)
    return frozenset(found)


def own_states(program: Program, reads: frozenset[str]) -> dict[str, StatePlace]:
    """The states that a stage has: a layer's only if the stage reads them."""
    return {n: s for n, s in program.states.items() if n in reads or _OF_LAYER.match(n) is None}


def own_tensors(states: Mapping[str, StatePlace]) -> frozenset[int]:
    """The tensors of the pool of blocks that these states lie in."""
    return frozenset(place.tensor for place in states.values() if place.axis == "block")


def stage_calls(calls: Sequence[PieceCall], results: Sequence[str], stage: Stage) -> list[PieceCall]:
    """All calls of the program. Calls of other stages keep only their shape instructions, so that tensor names still
    resolve. results: of the program."""
    owners = _owners([call.inputs for call in calls], stage.total)
    ends = {owner: at for at, owner in enumerate(owners) if owner is not None}  # a stage's last call
    made: list[PieceCall] = []
    for at, (call, owner) in enumerate(zip(calls, owners, strict=True)):
        own = owner in (stage.number, None)
        bundle = call.bundle if own else {**call.bundle, "code": [c for c in call.bundle["code"] if c[0] in _GEOMETRY]}
        call = call._replace(bundle=bundle)
        if owner is not None and ends[owner] == at:
            call = _passing_on(call, _live(calls, at, results), owner, stage)
        made.append(call)
    return made


class MessageBytes(NamedTuple):
    """Of a stage's largest messages: what it sends, and what it gets."""

    sent: int
    received: int

    @property
    def memory(self) -> int:
        """What messages take of a stage's memory."""
        return COPIES * self.sent + self.received


def message_bytes(artifact: Artifact, stage: Stage) -> MessageBytes:
    """Of the largest step."""
    graph = artifact.program.graphs[0]
    order = next(iter(graph.programs.values()))
    longest_query = max(b.query_len for b in graph.buckets)
    limits = {b: b.limits(artifact.config.max_num_seqs, longest_query) for b in graph.buckets}
    largest = max(graph.buckets, key=lambda b: (limits[b]["T"], limits[b]["R"]))
    calls = [
        PieceCall(json.loads((artifact.pieces / f"{piece}-{largest.name}.json").read_text()), inputs, outputs)
        for piece, inputs, outputs in order.calls
    ]
    linked = LinkedProgram(calls, order.results)
    owners = _owners([call.inputs for call in calls], stage.total)
    ends = {owner: at for at, owner in enumerate(owners) if owner is not None}

    def size(owner: int) -> int:
        values = (linked.alias[v] for v in _live(calls, ends[owner], order.results))
        places = [linked.places[name] for name in values if name in linked.places]
        numbers = (math.prod(value(d, limits[largest]) for d in place.shape) for place in places)
        sizes = (n * ITEMSIZE[linked.places[p.storage].dtype] for n, p in zip(numbers, places, strict=True))
        return sum(-(-nbytes // MESSAGE_ALIGN) * MESSAGE_ALIGN for nbytes in sizes)

    last = stage.total - 1
    received = [size(stage.number - 1)] if stage.number else []
    received += [size(last)] if stage.number < last else []
    return MessageBytes(size(stage.number), max(received))


def stage_parts(calls: Sequence[PieceCall], parts: Mapping[str, int], stage: Stage) -> dict[str, int]:
    """The parts of a program for a stage; `BEHIND`, which another step's layers may overtake, but for the last one.
    calls: of the program, all stages'."""
    if stage.number == stage.total - 1:
        return dict(parts)
    owners = _owners([call.inputs for call in calls], stage.total)
    return {BEHIND: max(at for at, owner in enumerate(owners) if owner is not None), **parts}


def _owners(inputs: Sequence[Sequence[str]], count: int) -> list[int | None]:
    """By call, the stage that makes it; None: every stage does. inputs: the values that each reads."""
    layers = [[int(m[1]) for n in names if (m := _OF_LAYER.match(n))] for names in inputs]
    total = 1 + max((i for found in layers for i in found), default=-1)
    if total < count:
        raise ConfigError(f"pipeline_parallel_size is {count}: the model has {total} layers; give at most as many")
    last = max(at for at, found in enumerate(layers) if found)
    owners: list[int | None] = []
    current = 0
    for at, found in enumerate(layers):
        if found:
            current = max(current, min(found) * count // total)
        owners.append(current if at <= last else None)
    return owners


def _live(calls: Sequence[PieceCall], at: int, results: Sequence[str]) -> list[str]:
    """Values that calls up to ``at`` make and later ones read, or that are results, in the order of their making."""
    later = {name for call in calls[at + 1 :] for name in call.inputs} | set(results)
    made = dict.fromkeys(name for call in calls[: at + 1] for name in call.outputs)
    return [name for name in made if name in later]


def _passing_on(call: PieceCall, values: Sequence[str], owner: int, stage: Stage) -> PieceCall:
    """The last call of the stage ``owner``, and what this stage does with the values after it."""
    local = dict(zip(call.outputs, call.bundle["outputs"], strict=True))
    more = {name: f"passed.{name}" for name in values if name not in local}
    tensors = [["t", local.get(value) or more[value]] for value in values]
    routine = _routine(owner, stage) if values else None
    code = [] if routine is None else [["message", routine[0], [stage.total, routine[1], *tensors]]]
    bundle = {
        **call.bundle,
        "inputs": [*call.bundle["inputs"], *more.values()],
        "code": [*call.bundle["code"], *code],
    }
    return PieceCall(bundle, [*call.inputs, *more], call.outputs)


def _routine(owner: int, stage: Stage) -> tuple[str, int] | None:
    """The routine that a stage calls with the values after the last call of the stage ``owner``, and the routine's
    argument, a stage."""
    if owner == stage.total - 1:
        return "send_to_stages" if stage.number == owner else "receive_from_stage", owner
    if stage.number == owner:
        return "send_to_stage", owner + 1
    return ("receive_from_stage", owner) if stage.number == owner + 1 else None
