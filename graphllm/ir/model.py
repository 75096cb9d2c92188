"""The contract of a model file: pure functions and frozen data, registered under the architecture names it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.ir.weight import Weight

_models: dict[str, Model] = {}


class Attn(NamedTuple):
    """Where each sequence's tokens and KV pages are, in the argument order of `paged_attention` after ``kv_cache``.

    block_table [S, B] int32: page ids. query_start_loc [S+1] int32: sequence s owns rows
    query_start_loc[s]:query_start_loc[s+1].
    seq_lens [S] int32: tokens of the sequence including this step's.
    """

    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class Step(NamedTuple):
    """What a model function may read about the running step; all tensors live on the device.

    token_ids [T] int32. positions [T] int32: position of the token in its sequence. context_len [T] int32: number of
    tokens of the sequence known when the token was scheduled (the prompt's length during prefill), for position
    encodings that depend on length. logits_indices [S] int32: the row of x whose logits are wanted, one per sequence.
    """

    token_ids: Tensor
    positions: Tensor
    context_len: Tensor
    logits_indices: Tensor
    attn: Attn


class ModelConfig(Protocol):
    """What every family's Config offers; the rest is the family's own."""

    D: int  # model width
    H: int  # query heads
    K: int  # key/value heads
    E: int  # head dimension
    V: int  # vocabulary
    max_len: int  # positions the checkpoint was made for


@dataclass(frozen=True)
class Model:
    """One architecture family.

    architectures: names in ``config.json`` that it serves. config: builds the family's frozen Config from that file's
    dict. kinds: the kind of each layer, in order (one name repeated, or e.g. "local"/"global"). *_weights: the
    parameters of each unit as data. embed(c, w, step) -> (x_TD, shared): shared is a tuple of tensors every layer may
    read (rotary
    cos/sin). layer(c, kind, w, x_TD, shared, step, kv_cache) -> x_TD. head(c, w, x_TD, step) -> logits_SV.
    shardable: the fields of Config that a tensor-parallel rank has a share of; empty where that is not supported.
    """

    architectures: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], Any]
    kinds: Callable[[Any], tuple[str, ...]]
    embed_weights: Callable[[Any], dict[str, Weight]]
    layer_weights: Callable[[Any, str], dict[str, Weight]]
    head_weights: Callable[[Any], dict[str, Weight]]
    embed: Callable[[Any, SimpleNamespace, Step], tuple[Tensor, tuple[Tensor, ...]]]
    layer: Callable[[Any, str, SimpleNamespace, Tensor, tuple[Tensor, ...], Step, Tensor], Tensor]
    head: Callable[[Any, SimpleNamespace, Tensor, Step], Tensor]
    shardable: tuple[str, ...] = ()

    def local(self, c: Any, degree: int) -> Any:
        """The Config of one of ``degree`` tensor-parallel ranks: its shares of heads and feed-forward width. Raises
        ConfigError for what cannot be divided evenly."""
        if degree == 1:
            return c
        if not self.shardable:
            raise ConfigError(
                f"tensor_parallel_size is {degree}: {', '.join(self.architectures)} cannot be divided; use 1"
            )
        whole = {name: getattr(c, name) for name in self.shardable}
        for name, extent in whole.items():
            if extent % degree:
                raise ConfigError(
                    f"tensor_parallel_size is {degree}: the model's {name} is {extent}, which is no multiple of it"
                )
        return dataclasses.replace(c, **{name: extent // degree for name, extent in whole.items()})


def register_model(model: Model) -> Model:
    """Make a family known under each of its architecture names. Raises ValueError when a name is taken."""
    for name in model.architectures:
        if name in _models:
            raise ValueError(f"architecture {name!r} is already registered")
        _models[name] = model
    return model


def all_models() -> dict[str, Model]:
    """The families registered so far, by architecture name. `graphllm.ir.registry.load_models` imports them all."""
    return dict(_models)


def select_rows(x_TD: Tensor, rows_S: Tensor) -> Tensor:
    """x_TD[rows_S]: plain aten shape work, for heads that need only some rows."""
    return torch.index_select(x_TD, 0, rows_S)
