"""Recognizing: recipes of transformers' own layers over our ops compute what they did, have the sequences of ops that
hand-written families have, and leave alone what only looks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.trace import trace_unit
from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.adoption import Adopted, traced
from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.compile.transformers_model.recognize import recognized
from graphllm.ir import ForwardContext, Graph, Model, Weight
from graphllm.ir.graph import Shapes, TensorSpec, target_name
from graphllm.ir.model import AttentionMetadata
from graphllm.model_defs import gemma, llama
from graphllm.weights.plan.evaluate import evaluate
from graphllm.weights.plan.expr import Read
from graphllm.weights.plan.plan import make_plan
from graphllm.weights.plan.simplify import Region
from tests.tiers import thorough

aten = torch.ops.aten
T, P = 7, 4  # tokens of a step, of two sequences; tokens of a block
QKV = "linear reshape split"
OUT = "attention reshape linear"
GATED = "linear swiglu linear"
# What a layer of a type is, from its norm on; "full" and "sliding" ones are alike.
LAYERS = {
    "llama": f"rms_norm {QKV} rope rope {OUT} add rms_norm {GATED} add",
    "qwen3": f"rms_norm {QKV} rms_norm rms_norm rope rope {OUT} add rms_norm {GATED} add",
    "gemma3_text": f"rms_norm {QKV} rms_norm rms_norm rope rope {OUT} rms_norm add rms_norm linear geglu linear "
    "rms_norm add",
    "phi3": f"rms_norm {QKV} rope rope {OUT} add rms_norm {GATED} add",
    "olmo2": f"linear split rms_norm rms_norm reshape reshape reshape rope rope {OUT} rms_norm add {GATED} "
    "rms_norm add",
    "glm4": f"rms_norm {QKV} rope rope {OUT} rms_norm add rms_norm {GATED} rms_norm add",
    "gpt_neox": f"layer_norm linear reshape slice slice rope slice rope {OUT} layer_norm linear gelu linear add add",
    "starcoder2": f"layer_norm {QKV} rope rope {OUT} add layer_norm linear gelu linear add",
    "nemotron": f"layer_norm {QKV} rope rope {OUT} add layer_norm linear relu square linear add",
    "opt": f"layer_norm {QKV} {OUT} add layer_norm linear relu linear add",
    "gpt_bigcode": f"layer_norm {QKV} {OUT} add layer_norm linear gelu linear add",
    "nanochat": f"rms_norm {QKV} neg rope rope rms_norm rms_norm {OUT} add rms_norm linear relu square linear add",
}
FAST = ("llama", "gpt_neox")
FURTHER = (
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma2", "glm", "gpt2", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "jais2", "lfm2", "ministral", "mixtral", "moshi", "olmo", "persimmon",
    "phi", "qwen2", "seed_oss", "smollm3", "stablelm", "vaultgemma",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {"stablelm": {"qk_layernorm": True}, "cohere": {"use_qk_norm": True}}


def _adopted(kind: str) -> Adopted:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from tests.models.causal_types import tiny

    config = tiny(kind, **OWN.get(kind, {}))
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [(found[0] if isinstance(found, tuple) else found).__name__]
    return traced(config.to_json_string(), 512)


def _units(model: Adopted) -> dict[str, Recipe]:
    return {"embed": model.embed, **{f"layer.{n}": r for n, r in model.layers.items()}, "head": model.head}


def _said(recipe: Recipe) -> str:
    """The names of a recipe's calls, but for those that only take results apart."""
    names = (str(n.target).split(".")[1] for n in recipe.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return " ".join(name.removesuffix("_with_sizes") for name in names)


class _Numbers:
    """Numbers of everything that a model's weights may read, by the name of the stored tensor."""

    def __init__(self, units: Mapping[str, Recipe]) -> None:
        draw = torch.Generator().manual_seed(0)
        self._stored: dict[str, Tensor] = {}
        for recipe in units.values():
            for weight in recipe.weights.values():
                for source in weight.sources:
                    numbers = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
                    self._stored.setdefault(str(source).replace("{layer}", "0"), 0.1 + 0.2 * numbers)

    def of(self, recipe: Recipe, others: Mapping[str, Recipe], dtype: torch.dtype) -> SimpleNamespace:
        """A recipe's finished parameters, as the weight plan says. others: all units, as weights may be tied."""
        plan = make_plan(_as_model(recipe, others["embed"]), None, "float32")
        made = SimpleNamespace()
        for name, weight in recipe.weights.items():
            expr = plan.expr_of(f"layers.0.{name}")
            value = evaluate(expr, self._fetch).reshape(weight.shape)
            setattr(
                made, name, value.to(dtype if weight.dtype == "model" else torch.promote_types(dtype, torch.float32))
            )
        return made

    def _fetch(self, region: Region) -> Tensor:
        whole = self._stored[region.read.sources[0]]
        return whole[tuple(slice(a, b) for a, b in zip(region.starts, region.stops, strict=True))]


def _never(*_: Any) -> Any:
    raise AssertionError("only its weights are read")


def _as_model(recipe: Recipe, embed: Recipe) -> Model:
    graph = Graph(
        lambda c: ("unit",), lambda c: embed.weights, lambda c, layer_type: recipe.weights, lambda c: {},
        _never, _never, _never,
    )  # fmt: skip
    return Model(("Any",), lambda hf: None, (graph,))


def _run(
    unit: str, recipe: Recipe, model: Adopted, w: SimpleNamespace, x: Tensor | None, shared: Any
) -> tuple[Tensor, ...]:
    """A unit over two sequences: one of 4 new tokens, one of 3 after 2 that are in the cache."""
    inputs = SimpleNamespace(
        token_ids=torch.tensor([3, 9, 4, 1, 7, 2, 5], dtype=torch.int32),
        positions=torch.tensor([0, 1, 2, 3, 2, 3, 4], dtype=torch.int32),
        logits_indices=torch.tensor([3, 6], dtype=torch.int32),
    )
    blocks = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32)
    attn = AttentionMetadata(
        blocks, torch.tensor([0, 4, 7], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    )
    specs = model.states(unit.removeprefix("layer.")) if unit.startswith("layer.") else ()
    draw, state = torch.Generator().manual_seed(2), SimpleNamespace()
    for spec in specs:
        shape = [P if n == "P" else int(n) for n in spec.shape]
        setattr(state, spec.name, torch.randn(4, *shape, generator=draw, dtype=torch.float64).float())
    return recipe.run(w, ForwardContext(inputs, state, attn, shared), x)


def _check_same(model: Adopted, made: Mapping[str, Recipe]) -> None:
    units = _units(model)
    numbers, dtype = _Numbers(units), torch.float32
    shared: tuple[Tensor, ...] = ()
    width = next(n for n in model.head.graph.nodes if n.target == "x").meta["val"].shape[1]
    x = torch.randn(T, width, generator=torch.Generator().manual_seed(1))
    for unit, recipe in units.items():
        given = None if unit == "embed" else x
        expected = _run(unit, recipe, model, numbers.of(recipe, units, dtype), given, shared)
        found = _run(unit, made[unit], model, numbers.of(made[unit], made, dtype), given, shared)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6 * max(1.0, float(b.abs().max())))
        if unit == "embed":
            shared = expected[1:]


@pytest.mark.parametrize("kind", [*FAST, *(thorough(k) for k in (*LAYERS, *FURTHER) if k not in FAST)])
def test_recognized_units_compute_the_same(kind: str) -> None:
    model = _adopted(kind)
    made = {name: recognized(recipe, {}) for name, recipe in _units(model).items()}
    if kind in LAYERS:
        assert {_said(r) for n, r in made.items() if n.startswith("layer")} == {LAYERS[kind]}
        assert not any(r.notes for r in made.values())
    _check_same(model, made)


def _ops(graph: torch.fx.Graph) -> list[str]:
    """The names of a graph's calls, but for sizes of tokens, which the pass canonicalize writes as -1."""
    names = [target_name(n.target) for n in graph.nodes if n.op == "call_function"]
    return [name for name in names if not name.startswith("aten::sym_size")]


def _unit_of(
    fn: Callable[[SimpleNamespace, Tensor, ForwardContext], Tensor], weights: Mapping[str, Weight], kv: tuple[int, ...],
    F: int, D: int,
) -> list[str]:  # fmt: skip
    """The ops of a layer, traced as the compiler does it."""
    inputs = {f"w.{n}": TensorSpec.contiguous("bfloat16" if w.dtype == "model" else "float32", *w.shape)
              for n, w in weights.items()}  # fmt: skip
    inputs |= {"x": TensorSpec.contiguous("bfloat16", "T", D), "kv": TensorSpec.contiguous("bfloat16", 9, *kv)}
    inputs |= {f"shared.{i}": TensorSpec.contiguous("float32", "T", F) for i in range(4)}
    ints = {"block_table": ("S", 3), "query_start_loc": ("S + 1",), "seq_lens": ("S",)}
    inputs |= {n: TensorSpec.contiguous("int32", *s) for n, s in ints.items()}

    def run(v: dict[str, Any]) -> tuple[Tensor]:
        w = SimpleNamespace(**{n[2:]: t for n, t in v.items() if n.startswith("w.")})
        attn = AttentionMetadata(*(v[n] for n in ints))
        shared = tuple(v[f"shared.{i}"] for i in range(4))
        return (fn(w, v["x"], ForwardContext(SimpleNamespace(), SimpleNamespace(kv=v["kv"]), attn, shared)),)

    return _ops(trace_unit("layer", inputs, run, Shapes("cpu")).graph)


@pytest.mark.parametrize(
    ("kind", "family", "architecture"),
    [
        ("llama", llama, "LlamaForCausalLM"),
        thorough("qwen3", llama, "Qwen3ForCausalLM"),
        thorough("gemma3_text", gemma, "Gemma3ForCausalLM"),
        thorough("gemma2", gemma, "Gemma2ForCausalLM"),
    ],
)
def test_layers_are_those_of_the_written_families(kind: str, family: Any, architecture: str) -> None:
    from tests.models.causal_types import tiny

    config = tiny(kind)
    c = family.from_hf({**config.to_dict(), "architectures": [architecture]})
    model = _adopted(kind)
    layer_type = c.layer_types[0]
    made = recognized(model.layers[layer_type], {})
    kv = (2, c.K, P, c.E)

    def native(w: SimpleNamespace, x: Tensor, ctx: ForwardContext) -> Tensor:
        own = ctx._replace(shared=ctx.shared if family is gemma else ctx.shared[:2])
        return family.layer(c, layer_type, w, x, own)

    def traced(w: SimpleNamespace, x: Tensor, ctx: ForwardContext) -> Tensor:
        return made.run(w, ctx, x)[0]

    weights = family.layer_weights(c, layer_type)
    expected = _unit_of(native, weights, kv, c.E // 2, c.D)
    assert _unit_of(traced, made.weights, kv, c.E // 2, c.D) == expected
    by_sources = {(w.sources, w.segments, w.shard, w.heads, w.shape) for w in weights.values() if w.shard}
    assert {(w.sources, w.segments, w.shard, w.heads, w.shape) for w in made.weights.values() if w.shard} == by_sources


def _recipe(fn: Callable[..., Tensor], weights: Mapping[str, tuple[int, ...]], **inputs: tuple[Any, ...]) -> Recipe:
    """A recipe of a function of named weights and of inputs, with a first dimension of tokens. Those named "shared_0"
    and "shared_1" are tables."""
    shapes = Shapes("cpu")
    labels = [f"w.{n}" for n in weights] + [n.replace("_", ".") for n in inputs]
    with shapes.mode, torch.no_grad():
        given = [torch.zeros(s, dtype=torch.bfloat16) for s in weights.values()]
        for name, shape in inputs.items():
            dtype = torch.float32 if name.startswith("shared") else torch.bfloat16
            given.append(torch.zeros(shapes.symbols["T"], *shape, dtype=dtype))
        graph = make_fx(lambda *v: (fn(*v),), pre_dispatch=True)(*given).graph
    for node, label in zip(list(graph.find_nodes(op="placeholder")), labels, strict=True):
        node.target = label
    graph.eliminate_dead_code()
    return Recipe(graph, {n: Weight(s, (f"m.{{layer}}.{n}.weight",)) for n, s in weights.items()})


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _rotation(turn: Callable[[Tensor, Tensor, Tensor], Tensor], form: str, E: int) -> Recipe:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, leaf_ops.spread(cos, form), leaf_ops.spread(sin, form))

    return _recipe(run, {}, x=(3, E), shared_0=(4,), shared_1=(4,))


ROTATIONS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str, str]] = {
    "halves": (_turned, "halves", "rope"),
    "backwards": (lambda x, c, s: _turned(x, c, -s), "halves", "neg rope"),
    "part of a head": (lambda x, c, s: torch.cat((_turned(x[..., :8], c, s), x[..., 8:]), -1), "halves", "rope"),
    "last part": (lambda x, c, s: torch.cat((x[..., :4], _turned(x[..., 4:], c, s)), -1), "halves",
                  "slice slice rope cat"),
    "by parts": (lambda x, c, s: torch.cat((x[..., :4] * c[:, None] - x[..., 4:] * s[:, None],
                                            x[..., 4:] * c[:, None] + x[..., :4] * s[:, None]), -1), "plain", "rope"),
    "twice as large": (lambda x, c, s: _turned(x, c * 2, s), "halves", ""),
    "one table": (lambda x, c, s: _turned(x, c, c), "halves", ""),
    "a reflection": (lambda x, c, s: x * c[:, None] + x.roll(4, -1) * s[:, None], "halves", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations(name: str) -> None:
    turn, form, expected = ROTATIONS[name]
    E = 12 if "part of" in name or name == "last part" else 8
    recipe = _rotation(turn, form, E)
    made = recognized(recipe, {})
    if expected:
        assert _said(made) == expected
        assert not made.notes
    else:
        assert "rope" not in _said(made).split()
        assert any("rotation" in why for _, why in made.notes)
    x, angles = torch.randn(T, 3, E), torch.randn(T, 4)
    ctx = ForwardContext(SimpleNamespace(), SimpleNamespace(), None, (angles.cos(), angles.sin()))  # type: ignore[arg-type]
    torch.testing.assert_close(made.run(SimpleNamespace(), ctx, x), recipe.run(SimpleNamespace(), ctx, x))


def _rms(x: Tensor, dim: int = -1) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + 1e-6)).to(x.dtype)


NORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "weight last": (lambda w, x: w * _rms(x), "rms_norm"),
    "without a weight": (lambda w, x: _rms(x), "rms_norm"),
    "1 + w": (lambda w, x: (_rms(x.float()) * (1.0 + w.float())).type_as(x), "rms_norm"),
    "a root below": (lambda w, x: w * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)), "rms_norm"),
    "a power": (lambda w, x: w * (x * (x.square().mean(-1, keepdim=True) + 1e-6).pow(-0.5)), "rms_norm"),
    "centered": (lambda w, x: w * ((x - x.mean(-1, keepdim=True))
                                   * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-6)),
                 "layer_norm"),
    "other rows": (lambda w, x: w * (x[:, :8] * torch.rsqrt(x[:, 4:].pow(2).mean(-1, keepdim=True) + 1e-6)), ""),
    "a sum": (lambda w, x: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)), ""),
    "cubes": (lambda w, x: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    fn, expected = NORMS[name]
    width = 12 if name == "other rows" else 8
    recipe = _recipe(fn, {"w": (8,)}, x=(width,))
    made = recognized(recipe, {})
    assert _said(made) == expected if expected else "norm" not in _said(made)
    units = {"embed": recipe}
    numbers, x = _Numbers(units), torch.randn(T, width, dtype=torch.float32).abs()
    ctx = ForwardContext(SimpleNamespace(), SimpleNamespace(), None)  # type: ignore[arg-type]
    found = made.run(numbers.of(made, {"embed": made}, torch.float32), ctx, x)
    torch.testing.assert_close(found, recipe.run(numbers.of(recipe, units, torch.float32), ctx, x))


def test_norms_of_one_plus_a_weight_are_expressions_in_float32() -> None:
    recipe = _recipe(NORMS["1 + w"][0], {"w": (8,)}, x=(8,))
    (weight,) = recognized(recipe, {}).weights.values()
    assert weight.dtype == "float32"
    assert str(weight.expr) == "each(+1, read m.{layer}.w.weight [8])"


def _gate(order: str) -> Callable[..., Tensor]:
    def run(merged: Tensor, down: Tensor, x: Tensor) -> Tensor:
        both = torch.nn.functional.linear(x, merged)
        gate, up = both.chunk(2, -1) if order == "gate up" else both.chunk(2, -1)[::-1]
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)

    return run


def test_a_merged_gate_has_segments_and_one_that_comes_last_is_turned() -> None:
    for order in ("gate up", "up gate"):
        recipe = _recipe(_gate(order), {"merged": (12, 8), "down": (8, 6)}, x=(8,))
        made = recognized(recipe, {})
        assert _said(made) == "linear swiglu linear"
        (merged,) = (w for w in made.weights.values() if w.shape == (12, 8))
        assert (merged.segments, merged.shard) == ((6, 6), "output")
        assert {w.shard for w in made.weights.values()} == {"output", "input"}
        numbers, x = _Numbers({"embed": recipe}), torch.randn(T, 8)
        ctx = ForwardContext(SimpleNamespace(), SimpleNamespace(), None)  # type: ignore[arg-type]
        found = made.run(numbers.of(made, {"embed": made}, torch.float32), ctx, x)
        torch.testing.assert_close(found, recipe.run(numbers.of(recipe, {"embed": recipe}, torch.float32), ctx, x))


def test_projections_that_others_read_stay_apart() -> None:
    linear = torch.nn.functional.linear

    def run(gate: Tensor, up: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(linear(x, gate)) * linear(x, up) + gate.sum()

    made = recognized(_recipe(run, {"gate": (6, 8), "up": (6, 8)}, x=(8,)), {})
    assert sorted(made.weights) == ["gate", "up"]
    assert any(what == "gate, up" for what, _ in made.notes)


def test_the_plan_says_where_a_pair_of_shares_begins() -> None:
    linear = torch.nn.functional.linear

    def run(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        return linear(linear(x, first).tanh(), second)

    recipe = _recipe(run, {"first": (6, 8), "second": (8, 6)}, x=(8,))
    shards = lambda plan: {n: w.shard for n, w in recognized(recipe, plan).weights.items()}  # noqa: E731
    assert shards({}) == shards({"m.*.first": "colwise"}) == {"first": "output", "second": "input"}
    assert shards({"m.*.first": "replicate"}) == {"first": None, "second": None}


def test_a_read_of_a_weight_is_as_before() -> None:
    recipe = _recipe(NORMS["weight last"][0], {"w": (8,)}, x=(8,))
    made = recognized(recipe, {})
    assert made.weights == recipe.weights
    assert [n.target for n in recipe.graph.nodes if n.op == "placeholder"] == ["w.w", "x"]
    assert Read(("m.{layer}.w.weight",), (8,)).shape == made.weights["w"].shape
