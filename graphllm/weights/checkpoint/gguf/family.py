"""`Family` and `Change`: the words in which the tables of GGUF's architectures are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from graphllm.weights.checkpoint.gguf.facts import Facts

Step = tuple[str | int, ...]
Derived = Callable[[Facts, dict[str, Any]], dict[str, Any]]


class Change(NamedTuple):
    """How a checkpoint's tensor is made of the file's numbers, where these are others.

    steps: names of `graphllm.weights.plan.gguf_steps`, the first one first; each may be followed by sizes, whole
        numbers or fields of the config.json.
    parts: names of the tensors that the first step takes; () is the tensor itself. With "{expert}" in a name the parts
        of each expert follow one another.
    """

    steps: tuple[Step, ...]
    parts: tuple[str, ...] = ()


class Family(NamedTuple):
    """An architecture of GGUF files.

    architecture: the name in config.json.
    names: a checkpoint's tensors by the file's. "blk." is the layer whose number "{layer}" stands for. A key without
        "weight" or "bias" holds for both. "{expert}" in a name says that the file has a stack, of which each expert's
        matrix is one tensor; two names, that its rows are in two tensors of equal size.
    fields: config.json's fields by the file's keys, without the architecture; "" for what has no effect here.
    settings: fields that no file has.
    present: fields that are true where a layer has a tensor.
    derived: what gives further fields, in this order.
    changes: by the checkpoint's tensor.
    interleaved: projections with the two halves of each head's rows by turns.
    only: keys with the one value that the family can have.
    when: a key that is true, or a tensor that is there, in files of this family, where an architecture has several.
    """

    architecture: str
    names: Mapping[str, str | tuple[str, ...]]
    fields: Mapping[str, str]
    settings: Mapping[str, Any] = {}
    present: Mapping[str, str] = {}
    derived: tuple[Derived, ...] = ()
    changes: Mapping[str, Change] = {}
    interleaved: tuple[str, ...] = ()
    only: Mapping[str, object] = {}
    when: str = ""


def in_layers(of: str, **names: str | tuple[str, ...]) -> dict[str, str | tuple[str, ...]]:
    """Names of tensors in layers. of: what a checkpoint's names begin with."""
    return {
        f"blk.{own}": of + name if isinstance(name, str) else tuple(of + n for n in name) for own, name in names.items()
    }
