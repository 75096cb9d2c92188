"""Rotary modules as leaves: frequencies of one longest context, and tables in the form that the module returns them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from graphllm.compile.transformers_model import leaf_ops

_PROBED = 9  # positions


def make_leaves(model: nn.Module, longest: int) -> None:
    """Have every rotary module of a model call `leaf_ops` where its results are a known form of the usual tables; the
    others are traced like any module. longest: the context whose frequencies serve all, where they depend on it."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            prefixes = [n.removesuffix("inv_freq") for n in module._buffers if n.endswith("inv_freq")]
            prefixes = [p for p in prefixes if not p.endswith("original_")]
            forms = {p: form for p in prefixes if (form := _settled(module, p, longest)) is not None}
            if forms:
                module.forward = _Leaf(module, forms)


class _Leaf:
    """What a rotary module does in a trace. forms: (form, exact), by what the names of its buffers begin with."""

    def __init__(self, module: nn.Module, forms: dict[str, tuple[str, bool]]) -> None:
        self._module, self._forms = module, forms

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        prefix = f"{layer_type}_" if layer_type else ""
        if prefix not in self._forms or position_ids.dim() != 2:
            return type(self._module).forward(self._module, x, position_ids, *([layer_type] if layer_type else []))
        form, exact = self._forms[prefix]
        inv_freq = getattr(self._module, f"{prefix}inv_freq")
        tables = leaf_ops.rope_table(
            position_ids, inv_freq, float(getattr(self._module, f"{prefix}attention_scaling", 1))
        )
        return tuple(leaf_ops.spread(table, form, exact) for table in tables)


def _settled(module: nn.Module, prefix: str, longest: int) -> tuple[str, bool] | None:
    """Give a module the frequencies of the longest context, for good; the form of its results, None for one that is not
    known."""
    layer_type = prefix.removesuffix("_") or None
    kind = getattr(module, "rope_type", "default")
    kind = kind[layer_type] if isinstance(kind, dict) else kind
    if kind in ("dynamic", "longrope"):
        row, scale = ROPE_INIT_FUNCTIONS[kind](module.config, "cpu", seq_len=longest, layer_type=layer_type)
        module._buffers[f"{prefix}inv_freq"] = row
        setattr(module, f"{prefix}attention_scaling", scale)
        kinds: Any = module.rope_type
        vars(module)["rope_type"] = {**kinds, layer_type: "default"} if layer_type else "default"
    positions = torch.arange(_PROBED)[None]
    x = torch.zeros(1, _PROBED, 8, dtype=torch.bfloat16)
    try:
        made = type(module).forward(module, x, positions, *([layer_type] if layer_type else []))
    except Exception:  # whatever it wants: it is no leaf then
        return None
    if not isinstance(made, tuple) or len(made) != 2 or not all(isinstance(t, Tensor) for t in made):
        return None
    angles = positions[..., None].float() * getattr(module, f"{prefix}inv_freq").float()
    scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    exact = made[0].dtype == torch.float32
    for form in ("halves", "pairs", "plain"):
        expected = [
            leaf_ops.spread_out(f(angles) * scale, form, exact, dtype=torch.bfloat16) for f in (torch.cos, torch.sin)
        ]
        if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(made, expected, strict=True)):
            return form, exact
    return None
