"""A program in stages: consecutive layers, each stage on a rank of its own, which has the weights and states of these
layers only.

Nothing of this is compiled: a program is a list of calls, and a stage makes only some of them. What is still to be read
goes on to the next stage behind its last call; behind the last layer's, the last stage sends what is left, the logits,
to all. Every stage does what follows, such as sampling, and so knows the tokens of the next step. Values keep the
places that the memory plan gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.program.linking import Call
from graphllm.program.states import place_from

PIPELINE = "pipeline"  # the group of ranks that have the stages of one model
BEHIND = "behind layers"  # the part of a program in which a stage gets the logits, and what follows them
_OF_LAYER = re.compile(r"(?:state\.)?layers\.(\d+)\.")
_GEOMETRY = ("empty", "view", "zeroed", "exchange")  # instructions of a piece that run nothing


class Stage(NamedTuple):
    """One of ``total``, from 0."""

    number: int
    total: int


def stage_reads(program: Mapping[str, Any], stage: Stage) -> frozenset[str]:
    """The weights and states that a stage reads. program: the content of program.json. Raises ConfigError for one that
    cannot have so many stages."""
    if len(program["graphs"]) > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {stage.total}: a model with a draft graph or an encoder has no stages; use 1"
        )
    found: set[str] = set()
    for described in program["graphs"][0]["programs"].values():
        inputs = [names for _, names, _ in described["calls"]]
        for names, owner in zip(inputs, _owners(inputs, stage.total), strict=True):
            if owner in (stage.number, None):
                found.update(names)
    return frozenset(found)


def own_states(program: Mapping[str, Any], reads: frozenset[str]) -> dict[str, Any]:
    """The entries of program.json's states that a stage has: those of layers only where it reads them."""
    return {n: s for n, s in program["states"].items() if n in reads or _OF_LAYER.match(n) is None}


def own_tensors(states: Mapping[str, Any]) -> frozenset[int]:
    """The tensors of the pool of blocks that these states lie in."""
    return frozenset(place.tensor for place in map(place_from, states.values()) if place.axis == "block")


def stage_calls(calls: Sequence[Call], results: Sequence[str], stage: Stage) -> list[Call]:
    """The calls of a stage, in a list that is as long: those of others are there for the places of what they make.
    results: of the program."""
    owners = _owners([call.inputs for call in calls], stage.total)
    ends = {owner: at for at, owner in enumerate(owners) if owner is not None}  # a stage's last call
    made: list[Call] = []
    for at, (call, owner) in enumerate(zip(calls, owners, strict=True)):
        own = owner in (stage.number, None)
        bundle = call.bundle if own else {**call.bundle, "code": [c for c in call.bundle["code"] if c[0] in _GEOMETRY]}
        call = call._replace(bundle=bundle)
        if owner is not None and ends[owner] == at:
            call = _passing_on(call, _live(calls, at, results), owner, stage)
        made.append(call)
    return made


def stage_parts(calls: Sequence[Call], parts: Mapping[str, int], stage: Stage) -> dict[str, int]:
    """The parts of a program for a stage, with `BEHIND`, which another step's layers may overtake. calls: of the
    program, all stages'."""
    owners = _owners([call.inputs for call in calls], stage.total)
    last = max(at for at, owner in enumerate(owners) if owner is not None)
    return {BEHIND: last + (stage.number == stage.total - 1), **parts}


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


def _live(calls: Sequence[Call], at: int, results: Sequence[str]) -> list[str]:
    """Values that calls up to ``at`` make and later ones read, or that are results, in the order of their making."""
    later = {name for call in calls[at + 1 :] for name in call.inputs} | set(results)
    made = dict.fromkeys(name for call in calls[: at + 1] for name in call.outputs)
    return [name for name in made if name in later]


def _passing_on(call: Call, values: Sequence[str], owner: int, stage: Stage) -> Call:
    """The last call of the stage ``owner``, and what this stage does with the values behind it."""
    local = dict(zip(call.outputs, call.bundle["outputs"], strict=True))
    more = {name: f"passed.{name}" for name in values if name not in local}
    routines = [*_routines(owner, stage)]
    code = [
        ["extern", name, [["t", local.get(value) or more[value]], PIPELINE, stage.total, other]]
        for value in values
        for name, other in routines
    ]
    bundle = {
        **call.bundle,
        "inputs": [*call.bundle["inputs"], *more.values()],
        "code": [*call.bundle["code"], *code],
    }
    return Call(bundle, [*call.inputs, *more], call.outputs)


def _routines(owner: int, stage: Stage) -> Iterator[tuple[str, int]]:
    """The routine that a stage calls with each value behind the last call of the stage ``owner``, and its argument."""
    if owner == stage.total - 1:
        yield "broadcast_from", owner
    elif stage.number == owner:
        yield "send_to", owner + 1
    elif stage.number == owner + 1:
        yield "receive_from", owner
