"""The contract of a model file: pure functions and frozen data, registered under the architecture names it serves."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from graphllm.config import Bucket, ConfigError
from graphllm.ir.weight import Weight
from graphllm.program.manifest import Implementation
from graphllm.program.specs import InputSpec, StateSpec

_models: dict[str, Model] = {}
_derivations: list[Callable[[str], Model | None]] = []
Task = Literal["generate", "pool", "encode", "draft", "snapshots"]


class AttentionMetadata(NamedTuple):
    """Where each sequence's tokens and their blocks are, in the order of `paged_attention`'s arguments after the cache.

    block_table [S, B] int32: block ids of the layer's cache group; entries after seq_lens, and what blocks hold after
    it, may be anything. query_start_loc [S+1] int32: sequence s owns rows query_start_loc[s]:query_start_loc[s+1].
    seq_lens [S] int32: tokens of the sequence including this step's.
    """

    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class ForwardContext(NamedTuple):
    """What a model function may read in addition to its weights and x; all tensors live on the device.

    inputs: the step's arrays by name. Every graph has token_ids [T], positions [T] (of the token in its
    sequence), context_lens [T] (tokens of the sequence known when the token was scheduled, the prompt's length during
    prefill, for position encodings that depend on length), logits_indices [R] (rows of x that are wanted),
    query_start_loc [S+1], seq_lens [S], slots [S] (entries of slot states; padding has the scrap one), state_versions
    [S] (the version of recurrent states that is valid, 0 without drafts), exports [S] (entries for states from inside
    of chunks, negative: none), all int32; and what the graph declares.
    state: a layer's own states and the family's, by name. attn: of a layer with block states. shared: what ``embed``
    returned in addition to x (rotary cos and sin).

    Sequences that need one more token come first, with all drafts that are verified; then prompts, in the order in
    which they came.
    """

    inputs: SimpleNamespace
    state: SimpleNamespace
    attn: AttentionMetadata
    shared: tuple[Tensor, ...] = ()


class Hidden(NamedTuple):
    """The hidden states that a draft graph reads. layers: of the main graph, after which they are taken (-1: the last
    one), concatenated. size: numbers of each. normed: also after the main graph's last norm. width: of the draft
    graph's own x, where it reads that in further runs, else 0."""

    layers: tuple[int, ...]
    size: int
    normed: bool
    width: int = 0


class Drafts(NamedTuple):
    """What the head of a draft graph may make: logits [S, V] of several drafts, one after the other; ids [V]: the
    tokens they stand for, where the graph has a vocabulary of its own."""

    logits: tuple[Tensor, ...]
    ids: Tensor | None = None


class FamilyConfig(Protocol):
    """What every family's Config offers; the rest is the family's own."""

    V: int  # vocabulary
    max_len: int  # positions the checkpoint was made for


def _no_specs(*_: Any) -> tuple[Any, ...]:
    return ()


def _no_weights(c: Any) -> dict[str, Weight]:
    return {}


def _nothing_hidden(c: Any, layers: int) -> Hidden | None:
    return None


@dataclass(frozen=True)
class Graph:
    """One graph of a family: a decoder, an encoder, a draft head.

    layer_types: the type of each layer, in order (one name repeated, or e.g. "full" and "sliding"); layers of one type
    differ only in their parameters. *_weights: the parameters of each unit as data. states: a layer's, by its type;
    block states of one layer have one retention. embed(c, w, ctx) -> (x_TD, shared). layer(c, layer_type, w, x_TD, ctx)
    -> x_TD. head(c, w, x_TD, ctx) -> what the task makes: logits [R, V] for "generate", a vector for each sampled row
    [R, D] for "pool", nothing for "encode": its layers or head write states. inputs: in addition to every graph's, each
    with a provider. buckets: the sizes it is compiled for, None for the config's. norm(c, w, x): of head's, what comes
    before the matrix of the vocabulary; draft graphs read it.

    A graph of the task "draft" guesses next tokens of another family; docs/adding-a-model.md shows one. hidden(c,
    layers): what it reads of the main graph, which has ``layers`` layers; None: only tokens. project(c, w, hidden_TD):
    makes of those the hidden states [T, D] that embed finds as ctx.inputs.hidden; in further runs embed finds what x is
    after the layers. head: logits [S, V] of the rows logits_indices, or `Drafts`. drafts_at_once: how many one run
    makes where no further run follows, 0 where runs follow and each makes one.

    context(c, layer_type, w, ctx): of a graph that guesses a block in one run over masks, mask_token(c), writes what a
    layer keeps of the step's tokens from their hidden states, in a run of its own before. In the run over the block,
    ctx.inputs.block_bits [T] are what `paged_attention` takes where all rows of a block see each other, and
    logits_indices the rows of its masks.
    """

    layer_types: Callable[[Any], tuple[str, ...]]
    embed_weights: Callable[[Any], dict[str, Weight]]
    layer_weights: Callable[[Any, str], dict[str, Weight]]
    head_weights: Callable[[Any], dict[str, Weight]]
    embed: Callable[[Any, SimpleNamespace, ForwardContext], tuple[Tensor, tuple[Tensor, ...]]]
    layer: Callable[[Any, str, SimpleNamespace, Tensor, ForwardContext], Tensor]
    head: Callable[[Any, SimpleNamespace, Tensor, ForwardContext], Any]
    states: Callable[[Any, str], tuple[StateSpec, ...]] = _no_specs
    inputs: Callable[[Any], tuple[InputSpec, ...]] = _no_specs
    buckets: Callable[[Any], tuple[Bucket, ...] | None] = lambda c: None
    norm: Callable[[Any, SimpleNamespace, Tensor], Tensor] | None = None
    hidden: Callable[[Any, int], Hidden | None] = _nothing_hidden
    project_weights: Callable[[Any], dict[str, Weight]] = _no_weights
    project: Callable[[Any, SimpleNamespace, Tensor], Tensor] | None = None
    drafts_at_once: Callable[[Any], int] = lambda c: 0
    context: Callable[[Any, str, SimpleNamespace, ForwardContext], None] | None = None
    mask_token: Callable[[Any], int] = lambda c: 0
    task: Task = "generate"
    name: str = ""

    @property
    def prefix(self) -> str:
        """What the names of its weights, units and layer states begin with; nothing for a family's main graph."""
        return f"{self.name}." if self.name else ""


@dataclass(frozen=True)
class Model:
    """One architecture family.

    architectures: names in ``config.json`` that it serves. config: builds the family's frozen Config from that file's
    dict. graphs: the first one is the main one, without a name. states: those that belong to no layer; every graph may
    read and write them. shardable: the fields of Config that a tensor-parallel rank has a share of, such as "H", or
    "mixer.H" of what the field mixer holds; empty where that is not supported. method: of a family of draft graphs,
    what users call it. part_of: the architectures with it in their checkpoints; empty where it has a checkpoint of its
    own.

    traced: of a family that is made from other code than its file, what that is and what stayed of it.

    Of the shardable fields, shared: heads that several ranks may have the same of, where they are fewer than ranks;
    of_experts: what stays whole where experts are divided by number. inner: the field of Config that has all of them,
    "" for Config itself.
    """

    architectures: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], Any]
    graphs: tuple[Graph, ...]
    states: Callable[[Any], tuple[StateSpec, ...]] = _no_specs
    shardable: tuple[str, ...] = ()
    method: str = ""
    part_of: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    of_experts: tuple[str, ...] = ()
    inner: str = ""
    traced: Callable[[Any], Implementation] | None = None

    def implementation(self, c: Any) -> Implementation:
        """Whose code it is."""
        if self.traced is not None:
            return self.traced(c)
        module = getattr(self.config, "func", self.config).__module__
        own = module.removeprefix("graphllm.model_defs.")
        return Implementation(module if own == module else f"model_defs/{own}.py")

    def local(self, c: Any, degree: int, experts_apart: bool = False) -> Any:
        """The Config of one of ``degree`` tensor-parallel ranks: its shares of heads and feed-forward width.
        experts_apart: each has some experts, of the whole width. Raises ConfigError for what cannot be divided
        evenly."""
        if degree == 1:
            return c
        if not self.shardable:
            raise ConfigError(
                f"tensor_parallel_size is {degree}: {', '.join(self.architectures)} cannot be divided; use 1"
            )
        local = own = getattr(c, self.inner) if self.inner else c
        for name in self.shardable:
            extent = operator.attrgetter(name)(own)
            if experts_apart and name in self.of_experts:
                continue
            if extent % degree and (name not in self.shared or degree % extent):
                raise ConfigError(
                    f"tensor_parallel_size is {degree}: the model's {name} is {extent}, which is no multiple of it"
                )
            local = _changed(local, name, extent // degree or min(extent, 1))
        return dataclasses.replace(c, **{self.inner: local}) if self.inner else local


def _changed(c: Any, name: str, value: Any) -> Any:
    """A config with another value of a field, or of a field of what one of its fields holds."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(c, **{first: _changed(getattr(c, first), rest, value) if rest else value})


def register_model(model: Model) -> Model:
    """Make a family known under each of its architecture names. Raises ValueError when a name is taken."""
    for name in model.architectures:
        if name in _models:
            raise ValueError(f"architecture {name!r} is already registered")
        _models[name] = model
    return model


def register_derivation(derive: Callable[[str], Model | None]) -> None:
    """Have architectures that no family has registered made of those that are there. derive: the family of a name, None
    for one that it does not know."""
    _derivations.append(derive)


def derived_model(architecture: str) -> Model | None:
    """The family that a derivation makes for a name; None where none does."""
    return next((model for derive in _derivations if (model := derive(architecture)) is not None), None)


def all_models() -> dict[str, Model]:
    """The families registered so far, by architecture name. `graphllm.ir.registry.load_models` imports them all."""
    return dict(_models)


def select_rows(x_TD: Tensor, rows_R: Tensor) -> Tensor:
    """x_TD[rows_R]: plain aten shape work, for heads that need only some rows."""
    return torch.index_select(x_TD, 0, rows_R)
