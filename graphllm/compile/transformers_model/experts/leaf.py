"""Experts: what transformers' modules of experts are in a trace, one call, and `fused_moe` in its place.

The function between the two products is found by what it computes, not by its name. Experts that `fused_moe` cannot say
stay transformers' own "batched_mm", ordinary ops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from graphllm.compile.transformers_model.experts.numbers import real_numbers
from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.compile.transformers_model.recognize.draft import Draft, name_of
from graphllm.ir import Weight
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.fused_moe.op import activate
from graphllm.ops.moe.fused_moe.operands import parts_of
from graphllm.weights.plan.expr import Expr, Permute, Read, Reshape
from graphllm.weights.plan.simplify import simplify

_library = torch.library.Library("graphllm_leaf", "FRAGMENT")
_library.define(
    "experts(Tensor x, Tensor experts, Tensor weights, Tensor first, Tensor down, Tensor? first_bias, "
    "Tensor? down_bias, str activation, float limit, bool transposed, bool by_turns) -> Tensor"
)


def _experts(
    x: Tensor, experts: Tensor, weights: Tensor, first: Tensor, down: Tensor, first_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, limit: float, transposed: bool, by_turns: bool,
) -> Tensor:  # fmt: skip
    """The experts of each token [T, A] applied to x [T, D] and added up by their weights [T, A]. first, down, and their
    biases: parameters as the module has them. activation, limit: as in `fused_moe`. transposed: matrices are [in, out].
    by_turns: rows of gates and of ups alternate."""
    return torch.empty_like(x)


torch.library.register_fake("graphllm_leaf::experts", _experts, lib=_library)
leaf = torch.ops.graphllm_leaf.experts.default
# Numbers before an activation: small ones, and ones after every bound.
_SCALES = (0.1, 1.0, 8.0, 100.0, 1e4, 1e6)


def register(name: str) -> None:
    """Make the leaf known to transformers as an implementation of experts."""
    ExpertsInterface.register(name, _forward)


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A module of experts [T, D] -> [T, D], as transformers calls it."""
    found = None if getattr(module, "has_post_expert_norm", False) else activation_of(module)
    if found is None:
        return batched_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (getattr(module, f"{first}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    by_turns = module.has_gate and not module.is_concatenated
    matrices = (getattr(module, first), module.down_proj)
    return leaf(hidden_states, top_k_index, top_k_weights, *matrices, *biases, *found, module.is_transposed, by_turns)


def activation_of(module: Any) -> tuple[str, float] | None:
    """The activation of `fused_moe` and its limit that compute what a module of experts computes between its products;
    None where none does."""
    with real_numbers(), torch.no_grad():
        torch_state = torch.random.get_rng_state()
        torch.manual_seed(0)
        halves = torch.cat([torch.randn(16, 32, dtype=torch.float64) * scale for scale in _SCALES])
        torch.random.set_rng_state(torch_state)
        if not module.has_gate:
            wanted, candidates = module.act_fn(halves), [("relu2", 0.0)]
        else:
            given = halves if module.is_concatenated else halves.unflatten(1, (2, 16)).transpose(1, 2).flatten(1)
            wanted = module._apply_gate(given)
            bounds = {float(v) for v in vars(module).values() if isinstance(v, int | float) and v > 0}
            candidates = [("silu", 0.0), ("gelu_tanh", 0.0), *(("clamped", bound) for bound in sorted(bounds))]
        for activation, limit in candidates:
            # Some compute in float32 whatever they get.
            if torch.allclose(activate(halves, activation, limit), wanted.double(), rtol=1e-6, atol=1e-9):
                return activation, limit
    return None


def with_experts(recipe: Recipe) -> Recipe:
    """The recipe with `fused_moe` in the places of leaves, and weights as it takes them."""
    draft = Draft(recipe)
    calls = draft.graph.find_nodes(op="call_function", target=leaf)
    for call in calls:
        _replace(draft, call)
    gathered = draft.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    if any(name_of(node.args[0]) and node.args[0].meta["val"].dim() == 3 for node in gathered):
        why = "the op fused_moe does not know what is between their products: each token reads its matrices by itself"
        draft.note("experts", why)
    return draft.recipe() if calls or tuple(draft.notes) != recipe.notes else recipe


def _replace(draft: Draft, call: Node) -> None:
    given: Any = call.args
    x, experts, weights, first, down, first_bias, down_bias, activation, limit, transposed, by_turns = given
    N, F = draft.weights[name_of(first)].shape[0], draft.weights[name_of(down)].shape[1 if transposed else 2]
    segments = (F,) * (N * parts_of(activation)) if parts_of(activation) > 1 else ()

    def stack(node: Any, **how: Any) -> Node | None:
        """A parameter in the form of `fused_moe`: [N, out, in], the gates before the ups."""
        if node is None:
            return None
        weight = draft.weights[name_of(node)]
        expr = _read(weight)
        if transposed and len(weight.shape) == 3:
            expr = Permute(expr, (0, 2, 1))
        if by_turns and how.get("segments"):
            expr = _halves(expr)
        expr = simplify(expr)
        made = replace(weight, expert_axis=0, **how)
        if not isinstance(expr, Read):
            made = replace(made, shape=expr.shape, sources=(), expr=expr)
        return draft.become(node, made)

    taken = {
        "x_TD": x,
        "gate_up_N2FD": stack(first, shard="output", segments=segments),
        "down_NDF": stack(down, shard="input"),
        "weights_TA": draft.cast(call, weights, torch.float32),
        "experts_TA": draft.cast(call, experts, torch.int32),
        "activation": activation,
        "limit": limit,
        "gate_up_bias_N2F": stack(first_bias, shard="output", segments=segments),
        "down_bias_ND": stack(down_bias),
    }
    draft.replace(call, draft.insert(call, fused_moe.overload, **{n: v for n, v in taken.items() if v is not None}))


def _read(weight: Weight) -> Expr:
    (source,) = weight.sources
    return Read((source,) if isinstance(source, str) else source, weight.shape)


def _halves(by_turns: Expr) -> Expr:
    """Of each expert the gates before the ups, from [N, 2F, ..] where they alternate."""
    N, twice, *inner = by_turns.shape
    pairs = Reshape(by_turns, (N, twice // 2, 2, *inner))
    return Reshape(Permute(pairs, (0, 2, 1, *range(3, len(pairs.to)))), (N, twice, *inner))
