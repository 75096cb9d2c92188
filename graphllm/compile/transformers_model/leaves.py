"""What stays opaque in a trace: attention and masks through transformers' own tables of implementations, rotary
modules, and a cache that keeps nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.refusal import refused

NAME = "graphllm"  # of what is ours in transformers' tables of implementations
_FAR = 1 << 20  # a position after every window
# Arguments of attention that say nothing of its scores.
_INERT = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "dropout"}


class MaskReadError(Exception):
    """A model's code takes a mask for a tensor."""


class StateReadError(Exception):
    """A model's code asks a cache for something other than keys and values."""


@dataclass(frozen=True)
class Mask:
    """What a token sees: itself and tokens before it, ``window`` in all if positive; with causal=False all tokens. It
    goes through a model's code in place of a mask. known: it is that; else no attention may read it."""

    causal: bool
    window: int
    known: bool = True

    def _read(self, *_: Any) -> Any:
        raise MaskReadError

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = _read

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name) and not name.startswith("_"):
            raise MaskReadError
        raise AttributeError(name)


class NoCache(Cache):
    """A cache that hands back what it is given: attention has the cache."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0

    def _state(self, *_: Any, **__: Any) -> Any:
        raise StateReadError

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _state


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Within a trace: tensors have numbers, and nothing is recorded."""
    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield


def _mask(*, mask_function: Callable[..., Tensor], **others: Any) -> Mask:
    """The `Mask` that a function of indices says, from what two tokens see by it."""
    with real_tensors():
        zero, rows = torch.zeros((), dtype=torch.long), list[tuple[int, int, Tensor, Tensor]]()
        for far in (_FAR, _FAR // 2 + 17):
            keys = torch.arange(far + 9)
            try:
                seen = mask_function(zero, zero, torch.tensor(far), keys).expand(len(keys))
            except Exception:  # it reads tensors of the step
                return Mask(True, 0, known=False)
            rows.append((far, int(seen.sum()), keys, seen))
        counts = [count for _, count, _, _ in rows]
        if all(count == len(keys) for _, count, keys, _ in rows):
            return Mask(False, 0)
        if counts == [far + 1 for far, _, _, _ in rows]:
            counts = [0, 0]
        for far, _, keys, seen in rows:
            expected = (keys <= far) & (keys > (far - counts[0] if counts[0] else -1))
            if counts[0] != counts[1] or not torch.equal(seen, expected):
                return Mask(True, 0, known=False)
    return Mask(True, counts[0])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers' models call it: query [1, H, T, E], key and value [1, K, T, E] give [1, T, H, E]."""
    name = type(module).__name__
    if wrong := [n for n, v in others.items() if isinstance(v, Tensor) and n not in _INERT]:
        raise refused(name, f"attention that also reads {', '.join(wrong)}")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = Mask(causal, sliding_window or 0)
    if not isinstance(attention_mask, Mask):
        raise refused(name, "attention with a mask of its own making")
    if not attention_mask.known:
        raise refused(name, "attention whose mask is neither causal nor a sliding window")
    if not attention_mask.causal:
        raise refused(name, "attention in which tokens see later ones")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(scale, int | float):
        raise refused(name, "attention whose scale is no number")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return leaf_ops.attention(q, k, v, float(scale), attention_mask.window, float(softcap or 0), s_aux), None


def register() -> None:
    """Make these known to transformers under our name."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
