"""Recipe: one unit of a model (embed, a layer of one kind, head) as a graph over ops, and how it is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.utils._pytree import tree_map

from graphllm.compile.transformers_model import leaf_ops
from graphllm.ir import ForwardContext, Weight
from graphllm.ops.attention.paged_attention import paged_attention

MODEL_DTYPE = torch.bfloat16  # stands for the model's dtype in a recipe; float32 stays float32


class Recipe(NamedTuple):
    """One unit of a model as a graph.

    graph: its placeholders' targets are "x" [T, D] (not of embed), "w.<name>" of a parameter, "shared.<i>" of what
        embed hands on and "in.<name>" of an input of `ForwardContext.inputs`. It returns a tuple: of embed x and what
        is shared, of a layer x, of head logits [R, V]. Calls are aten overloads, ops of graphllm, operators on sizes
        and `leaf_ops`. Every node has a fake value in meta["val"], with a symbolic T.
    weights: of each parameter, by its name without "w.". Sources are names of the module's parameters, with "{layer}"
        for a layer's index.
    notes: what stayed an ordinary op, and why.
    """

    graph: torch.fx.Graph
    weights: dict[str, Weight]
    notes: tuple[tuple[str, str], ...] = ()

    def run(self, w: SimpleNamespace, ctx: ForwardContext, x: Tensor | None = None) -> tuple[Tensor, ...]:
        """The unit's results. w: its parameters by name. The dtype of x, or else of a parameter, is the model's."""
        dtype, device = self._made_of(w, x)
        env: dict[Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                env[node] = _given(node.target, w, ctx, x)
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "output":
                return tuple(args[0])
            args, kwargs = tree_map(lambda v: _placed(v, dtype, device), (args, kwargs))
            with enable_python_dispatcher():  # else some kernels take a symbolic size for a number
                env[node] = _call(node.target, args, kwargs, ctx, dtype)
        raise AssertionError("a recipe has no output")

    def _made_of(self, w: SimpleNamespace, x: Tensor | None) -> tuple[torch.dtype, torch.device]:
        """The model's dtype and device."""
        names = (name for name, weight in self.weights.items() if weight.dtype == "model")
        of = x if x is not None else getattr(w, next(names))
        return of.dtype, of.device


def _placed(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """An argument of a call, with the model's dtype and device in the places of a recipe's."""
    return dtype if value is MODEL_DTYPE else device if isinstance(value, torch.device) else value


def _given(label: str, w: SimpleNamespace, ctx: ForwardContext, x: Tensor | None) -> Any:
    kind, _, name = label.partition(".")
    if kind == "x":
        return x
    if kind == "w":
        return getattr(w, name)
    return ctx.shared[int(name)] if kind == "shared" else getattr(ctx.inputs, name)


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: ForwardContext, dtype: torch.dtype) -> Any:
    if target is leaf_ops.spread:
        return leaf_ops.spread_out(*args, **kwargs, dtype=dtype)
    return _attend(ctx, *args, **kwargs) if target is leaf_ops.attention else target(*args, **kwargs)


def _attend(
    ctx: ForwardContext, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: Tensor | None = None, causal: bool = True, state: str = "kv",
) -> Tensor:  # fmt: skip
    assert causal, "bidirectional attention has no cache; `traced` refuses it"
    of = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks}
    return paged_attention(q, k, v, getattr(ctx.state, state), *ctx.attn, **of)
