"""Experts of transformers' models as `moe_route` and `fused_moe`: each block of experts against its own forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PretrainedConfig

from graphllm.compile.transformers_model import leaves
from graphllm.compile.transformers_model.checkpoint.stored import with_stored
from graphllm.compile.transformers_model.experts.leaf import activation_of, with_experts
from graphllm.compile.transformers_model.experts.routing import with_routing
from graphllm.compile.transformers_model.functional import make_functional
from graphllm.compile.transformers_model.recipe import MODEL_DTYPE, Recipe
from graphllm.compile.transformers_model.unbatched import unbatched
from graphllm.ir import Weight
from graphllm.ir.graph import Shapes
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.weights.plan.evaluate import evaluate
from graphllm.weights.plan.expr import Concat, Read, Stack
from graphllm.weights.plan.plan import expr_of_sources
from graphllm.weights.plan.simplify import Region
from tests.compile.transformers_sizes import random_model, tiny
from tests.tiers import thorough


def block_of(model: Any) -> nn.Module:
    """The last module of a model with a router and experts."""
    names = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    return model.get_submodule(names[-1].rpartition(".")[0])


def traced(block: nn.Module, D: int) -> Recipe:
    """A module [1, T, D] -> [1, T, D] as a recipe in bfloat16."""
    leaves.register()
    shapes = Shapes("cpu")
    tensors = dict([*block.named_parameters(), *block.named_buffers()])
    with shapes.mode:
        fakes = [torch.empty(t.shape, dtype=MODEL_DTYPE) for t in tensors.values()]
        x = torch.empty(1, shapes.symbols["T"], D, dtype=MODEL_DTYPE)

    def run(*given: Tensor) -> Tensor:
        made = functional_call(block, dict(zip(tensors, given, strict=False)), (given[-1],))
        return made if isinstance(made, Tensor) else made[0]

    with shapes.mode, torch.no_grad():
        graph = make_fx(run, pre_dispatch=True)(*fakes, x).graph
    for node, name in zip(graph.find_nodes(op="placeholder"), [*(f"w.{n}" for n in tensors), "x"], strict=True):
        node.target = name
    make_functional(graph, shapes)
    return Recipe(unbatched(graph, shapes), {n: Weight(tuple(t.shape), (n,)) for n, t in tensors.items()})


def finished(weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
    """A weight made of a module's own tensors."""

    def fetch(region: Region) -> Tensor:
        box = tuple(slice(a, b) for a, b in zip(region.starts, region.stops, strict=True))
        return tensors[region.read.sources[0]][box]

    if weight.value is not None:
        return torch.tensor(weight.value)
    expr = weight.expr if weight.expr is not None else expr_of_sources("w", weight, None)
    return evaluate(expr, fetch).contiguous()  # type: ignore[arg-type]


def calls(recipe: Recipe, op: Any) -> list[dict[str, Any]]:
    return [op.bind(n.args, n.kwargs) for n in recipe.graph.find_nodes(op="call_function", target=op.overload)]


def check(model_type: str, **changes: Any) -> Recipe:
    """The recipe of a model type's experts, after it gave what transformers' own code gives."""
    cls, config = tiny(model_type, **changes)
    block = block_of(random_model(cls, config).eval())
    return compared(block, config, config.get_text_config().hidden_size)


def compared(block: nn.Module, config: Any, D: int) -> Recipe:
    """The same of a module [1, T, D] -> [1, T, D]."""
    for tensor in block.parameters():  # of a size that reaches the bends of functions between products
        tensor.data.mul_(0.3)
    x = torch.randn(7, D)

    def use(implementation: str) -> None:
        for module in block.modules():
            if isinstance(config := getattr(module, "config", None), PretrainedConfig):
                config._experts_implementation = implementation

    use("eager")
    with torch.no_grad():
        made = block(x[None])
        expected = (made if isinstance(made, Tensor) else made[0]).view(7, D)
    use(leaves.NAME)
    recipe = with_routing(with_experts(traced(block, D)))
    own = block.state_dict() | dict(block.named_buffers())
    w = SimpleNamespace(**{n: finished(weight, own) for n, weight in recipe.weights.items()})
    (actual,) = recipe.run(w, SimpleNamespace(), x)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    return recipe


# Changes of the config; scoring, renormalize, scale, groups, kept_groups, whether there is a correction.
ROUTES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "mixtral": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "qwen2_moe": ({}, ("softmax", False, 1.0, 1, 1, False)),
    "granitemoe": ({}, ("softmax", True, 1.0, 1, 1, False)),  # the softmax of the chosen ones
    "deepseek_v2": (
        {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "num_experts_per_tok": 2},
        ("softmax", False, 1.0, 4, 1, False),
    ),
    "deepseek_v3": ({"n_routed_experts": 8, "n_group": 4, "topk_group": 2}, ("sigmoid", True, 2.5, 4, 2, True)),
    "phimoe": ({}, ("sparsemixer", True, 1.0, 1, 1, False)),
    "ernie4_5_moe": ({}, ("softmax", True, 1.0, 1, 1, True)),
    "qwen3_moe": ({"norm_topk_prob": True}, ("softmax", True, 1.0, 1, 1, False)),
    "olmoe": ({}, ("softmax", False, 1.0, 1, 1, False)),
    "glm4_moe": ({"norm_topk_prob": False, "routed_scaling_factor": 1.5}, ("sigmoid", False, 1.5, 1, 1, True)),
    "hunyuan_v1_moe": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "dots1": ({}, ("sigmoid", False, 1.0, 1, 1, True)),
    "minimax": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "minimax_m2": ({}, ("sigmoid", True, 1.0, 1, 1, True)),
    "flex_olmo": ({}, ("softmax", False, 1.0, 1, 1, False)),
    "flint": ({"mlp_only_layers": []}, ("sigmoid", True, 1.0, 1, 1, False)),
    "afmoe": ({}, ("sigmoid", True, 1.0, 1, 1, True)),
    "aria_text": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "axk2": ({"n_routed_experts": 8, "n_group": 4, "topk_group": 2}, ("sigmoid", True, 2.5, 4, 2, True)),
    "bailing_hybrid": (
        {"num_experts": 8, "num_expert_group": 2, "num_experts_per_token": 2},
        ("sigmoid", True, 2.5, 2, 1, True),
    ),
    "beam": ({}, ("sigmoid", True, 1.0, 1, 1, True)),
    "cohere2_moe": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "exaone_moe": ({}, ("sigmoid", True, 2.5, 1, 1, True)),
    "glm4_moe_lite": ({}, ("sigmoid", True, 1.8, 1, 1, True)),
    "hy_v3": ({}, ("sigmoid", True, 2.826, 1, 1, True)),
    "jamba": ({}, ("softmax", False, 1.0, 1, 1, False)),
    "laguna": ({}, ("sigmoid", True, 1.0, 1, 1, True)),
    "lfm2_moe": (
        {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
        ("sigmoid", False, 1.0, 1, 1, True),
    ),
    "mellum": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "mimo_v2_flash": ({}, ("sigmoid", True, 1.0, 1, 1, True)),
    "qwen3_5_moe_text": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "qwen3_next": ({}, ("softmax", True, 1.0, 1, 1, False)),
    "solar_open": ({}, ("sigmoid", True, 1.0, 1, 1, True)),
}
IN_FLOAT32 = {  # whose code casts the router's matrix
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "dots1", "flint", "axk2", "bailing_hybrid", "exaone_moe",
    "glm4_moe_lite", "hy_v3", "mimo_v2_flash", "solar_open", "beam",
}  # fmt: skip
FIRST = ("mixtral", "qwen2_moe", "granitemoe", "deepseek_v2", "deepseek_v3", "phimoe", "ernie4_5_moe")


@pytest.mark.parametrize("model_type", [*FIRST, *(thorough(t) for t in ROUTES if t not in FIRST)])
def test_experts_are_routed_and_computed_by_our_ops(model_type: str) -> None:
    changes, expected = ROUTES[model_type]
    recipe = check(model_type, **changes)
    (route,), (experts,) = calls(recipe, moe_route), calls(recipe, fused_moe)
    fields = ("scoring", "renormalize", "scale", "groups", "kept_groups")
    assert (*(route[field] for field in fields), route["bias_N"] is not None) == expected
    assert experts["activation"] == "silu"
    inputs = (node for node in recipe.graph.find_nodes(op="placeholder") if node.target != "x")
    by_name = {node: recipe.weights[node.target.removeprefix("w.")] for node in inputs}
    gate_up, down = by_name[experts["gate_up_N2FD"]], by_name[experts["down_NDF"]]
    N, twice, D = gate_up.shape
    assert (gate_up.shard, gate_up.expert_axis, gate_up.segments) == ("output", 0, (twice // 2,) * (2 * N))
    assert (down.shape, down.shard, down.expert_axis) == ((N, D, twice // 2), "input", 0)
    (router,) = (w for w in by_name.values() if w.exact and len(w.shape) == 2)
    assert router.shape == (N, D)
    assert router.dtype == ("float32" if model_type in IN_FLOAT32 else "model")
    assert not recipe.notes


@pytest.mark.parametrize(
    ("model_type", "activation", "limit", "biased"),
    [("gpt_oss", "clamped", 7.0, True), thorough("nemotron_h", "relu2", 0.0, False),
     thorough("minimax_m3_vl_text", "clamped", 7.0, False)],
)  # fmt: skip
def test_other_functions_between_the_products(model_type: str, activation: str, limit: float, biased: bool) -> None:
    """Bounds, biases, matrices that are stored transposed, gates and ups by turns, and experts without a gate."""
    recipe = check(model_type)
    (experts,) = calls(recipe, fused_moe)
    assert (experts["activation"], experts["limit"], experts["down_bias_ND"] is not None) == (activation, limit, biased)
    assert len(calls(recipe, moe_route)) == 1


@pytest.mark.parametrize("model_type", ["kolibri1", thorough("inkling_text"), thorough("zaya")])
def test_a_routing_of_its_own_stays_ordinary(model_type: str) -> None:
    """Here experts are chosen by logits, corrected, which a sigmoid then weighs."""
    recipe = check(model_type, **({"num_experts_per_tok": 1} if model_type == "zaya" else {}))
    assert not calls(recipe, moe_route)
    assert [what for what, _ in recipe.notes] == ["routing"]


@pytest.mark.parametrize("model_type", ["hy_v4", thorough("deepseek_v4")])
def test_experts_with_a_function_of_their_own_stay_ordinary(model_type: str) -> None:
    """A bounded gate with SiLU is none of fused_moe's activations."""
    recipe = check(model_type)
    assert not calls(recipe, fused_moe)
    assert [what for what, _ in recipe.notes] == ["experts"]


def test_weights_that_a_model_goes_on_with() -> None:
    """Gemma 4 multiplies the weights of experts by numbers of its own behind the routing."""
    cls, config = tiny("gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16)

    class Block(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.router, self.experts = layer.router, layer.experts

        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            _, weights, chosen = self.router(rows)
            return self.experts(rows, chosen, weights).reshape(x.shape)

    block = Block(random_model(cls, config).model.layers[-1])
    (route,) = calls(compared(block, config, 32), moe_route)
    assert (route["scoring"], route["renormalize"]) == ("softmax", True)


def test_an_activation_is_found_by_what_it_computes() -> None:
    def module(**fields: Any) -> Any:
        return SimpleNamespace(**({"has_gate": True, "is_concatenated": True} | fields))

    def gated(act: Any, bound: float | None = None) -> Any:
        def apply(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            return act(gate.clamp(max=bound)) * up if bound else act(gate) * up

        return apply

    silu, gelu = nn.functional.silu, nn.functional.gelu
    assert activation_of(module(_apply_gate=gated(silu))) == ("silu", 0.0)
    assert activation_of(module(_apply_gate=gated(lambda x: gelu(x, approximate="tanh")))) == ("gelu_tanh", 0.0)
    assert activation_of(module(_apply_gate=gated(gelu))) is None
    assert activation_of(module(_apply_gate=gated(silu, 50_000.0), limit=50_000.0)) is None
    assert activation_of(module(has_gate=False, act_fn=torch.relu)) is None


def test_weights_of_experts_become_those_of_the_checkpoint() -> None:
    """What is known of dividing them stays."""
    recipe = check("mixtral")
    name = next(n for n, w in recipe.weights.items() if n.endswith("gate_up_proj"))
    weight = recipe.weights[name]
    N, rows, D = weight.shape
    halves = [[Read((f"{n}.{part}",), (rows // 2, D)) for part in ("w1", "w3")] for n in range(N)]
    stored = {weight.sources[0]: Stack(tuple(Concat(tuple(of_one)) for of_one in halves))}
    made = with_stored(name, weight, stored)  # type: ignore[arg-type]
    assert (made.expr, made.sources) == (stored[weight.sources[0]], ())
    assert (made.segments, made.shard, made.expert_axis) == (weight.segments, "output", 0)
