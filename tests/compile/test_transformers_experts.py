"""Experts of transformers' models as `moe_route` and `fused_moe`: each block of experts against its own forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.transformers_model import leaves
from graphllm.compile.transformers_model.experts import activation_of, with_experts
from graphllm.compile.transformers_model.recipe import MODEL_DTYPE, Recipe
from graphllm.compile.transformers_model.routing import with_routing
from graphllm.compile.transformers_model.stored import with_stored
from graphllm.compile.transformers_model.unbatched import unbatched
from graphllm.ir import Weight
from graphllm.ir.graph import Shapes
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.weights.plan.evaluate import evaluate
from graphllm.weights.plan.plan import expr_of_sources
from graphllm.weights.plan.simplify import Region
from tests.compile.transformers_sizes import random_model, tiny
from tests.tiers import thorough


def block_of(model: Any) -> nn.Module:
    """The last module of a model with a router and experts."""
    names = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    return model.get_submodule(names[-1].rpartition(".")[0])  # type: ignore[no-any-return]


def traced(block: nn.Module, D: int) -> Recipe:
    """A module [1, T, D] -> [1, T, D] as a recipe in bfloat16."""
    leaves.register()
    shapes = Shapes("cpu")
    tensors = {n: t for n, t in [*block.named_parameters(), *block.named_buffers()]}
    with shapes.mode:
        fakes = [torch.empty(t.shape, dtype=MODEL_DTYPE) for t in tensors.values()]
        x = torch.empty(1, shapes.symbols["T"], D, dtype=MODEL_DTYPE)  # type: ignore[arg-type]

    def run(*given: Tensor) -> Tensor:
        made = functional_call(block, dict(zip(tensors, given, strict=False)), (given[-1],))
        return made if isinstance(made, Tensor) else made[0]

    with shapes.mode, torch.no_grad():
        graph = make_fx(run, pre_dispatch=True)(*fakes, x).graph
    for node, name in zip(graph.find_nodes(op="placeholder"), [*(f"w.{n}" for n in tensors), "x"], strict=True):
        node.target = name
    return Recipe(unbatched(graph, shapes), {n: Weight(tuple(t.shape), (n,)) for n, t in tensors.items()})


def finished(weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
    """A weight made of a module's own tensors."""
    def fetch(region: Region) -> Tensor:
        return tensors[region.read.sources[0]][tuple(slice(a, b) for a, b in zip(region.starts, region.stops))]

    if weight.value is not None:
        return torch.tensor(weight.value)
    expr = weight.expr if weight.expr is not None else expr_of_sources("w", weight, None)
    return evaluate(expr, fetch).contiguous()  # type: ignore[arg-type]


def calls(recipe: Recipe, op: Any) -> list[dict[str, Any]]:
    return [op.bind(n.args, n.kwargs) for n in recipe.graph.find_nodes(op="call_function", target=op.overload)]


def check(model_type: str, **changes: Any) -> Recipe:
    """The recipe of a block, after it gave what transformers' own code gives."""
    cls, config = tiny(model_type, **changes)
    model = random_model(cls, config).eval()
    block = block_of(model)
    for module in block.modules():  # numbers of a size that leaves the function between products its bends
        for tensor in module.parameters(recurse=False):
            tensor.data.mul_(0.3)
    D = config.get_text_config().hidden_size
    x = torch.randn(7, D)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        made = block(x[None])
        expected = (made if isinstance(made, Tensor) else made[0]).view(7, D)
    model.config._experts_implementation = leaves.NAME
    for module in block.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = leaves.NAME
    recipe = with_routing(with_experts(traced(block, D)))
    own = block.state_dict() | dict(block.named_buffers())
    w = SimpleNamespace(**{n: finished(weight, own) for n, weight in recipe.weights.items()})
    (actual,) = recipe.run(w, SimpleNamespace(), x)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    return recipe


# Scoring, whether weights are normalized, groups, correction, scale.
ROUTES: dict[str, tuple[Any, ...]] = {
    "mixtral": ("softmax", True, 1, False, 1.0),
}
