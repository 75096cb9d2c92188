"""AWQ (Lin et al. 2023): inner entries with large activations are multiplied before rounding, so that they lose less;
the layer that makes the activations is divided by the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.quantize.schemes import Scheme, grid_of

_STEPS = 20  # exponents that are tried


class Fold(NamedTuple):
    """Layers that can exchange a scale.

    maker: a norm or linear layer.
    readers: linear layers that read the maker's outputs, directly or multiplied channel by channel.
    """

    maker: str
    readers: tuple[str, ...]


_LLAMA = (
    Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fold("self_attn.v_proj", ("self_attn.o_proj",)),
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
)
FOLDS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite"), _LLAMA)
"""By model_type: of layers that are known to be built so."""


def folds_of(model_type: str) -> Sequence[Fold]:
    """The folds of a family's layers. Raises ConfigError for a family of unknown structure."""
    if model_type not in FOLDS:
        raise ConfigError(
            f"method is awq: what makes the activations of {model_type!r:.80} models is not known, it is of "
            f"{', '.join(FOLDS)}; use gptq or rtn"
        )
    return FOLDS[model_type]


def channel_scales(
    weights: Sequence[Tensor], gram_II: Tensor, size_I: Tensor, scheme: Scheme, dtype: torch.dtype, channels: Tensor
) -> Tensor:
    """The best factor of each inner entry.

    size_I: the mean magnitude of activations.
    channels: by inner entry, the output of the maker that it reads; entries of one output get one scale.
    """
    count = int(channels.max()) + 1
    size = torch.zeros(count, device=size_I.device).index_add_(0, channels, size_I) + 1e-8
    best, least = torch.ones(count, device=size_I.device), torch.inf
    for step in range(_STEPS):
        scales = size ** (step / _STEPS)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-4, 1e4)
        each, error = scales[channels], 0.0
        for weight in weights:
            scaled = weight * each
            off = grid_of(scaled, scheme, dtype).rounded(scaled)[1] / each - weight
            error += float(((off @ gram_II) * off).sum())
        if error < least:
            best, least = scales, error
    return best


def fold(
    tensors: Mapping[str, Tensor], made: Fold, scales: Tensor, channels: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors that change when the maker's outputs are divided by the scales. Those that are stored in a dtype are
    rounded to it first, and the readers are multiplied by what was really divided by."""
    norm = tensors[f"{made.maker}.weight"]
    changed: dict[str, Tensor] = {}
    if norm.dim() == 1:
        divided = (norm / scales).to(dtype).float()
        scales = torch.where(divided == 0, 1, norm / divided)
        changed[f"{made.maker}.weight"] = torch.where(divided == 0, norm, divided)
    else:
        changed[f"{made.maker}.weight"] = norm / scales.unsqueeze(1)
        if (bias := tensors.get(f"{made.maker}.bias")) is not None:
            changed[f"{made.maker}.bias"] = bias / scales
    for reader in made.readers:
        changed[f"{reader}.weight"] = tensors[f"{reader}.weight"] * scales[channels]
    return changed


def channels_of(makers: int, inner: int, head: int) -> Tensor:
    """By inner entry, the output of the maker that it reads: its own, or that of the key-value head which its head
    shares."""
    if makers == inner:
        return torch.arange(inner)
    entries = torch.arange(inner)
    sharing = inner // makers
    return entries // head // sharing * head + entries % head
