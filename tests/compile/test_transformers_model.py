"""The transformers backend: graphs of transformers' own modules without a batch dimension and without writes in place,
refusals, and parity of whole models of types that have no file here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.families import find_model
from graphllm.compile.transformers_model.functional import make_functional
from graphllm.compile.transformers_model.rows import mixing
from graphllm.compile.transformers_model.unbatched import unbatched
from graphllm.config import ConfigError
from graphllm.config.fields import MODEL_IMPL
from graphllm.ir.graph import Shapes
from tests.models import driver
from tests.models.causal_types import difference, random_model, tiny
from tests.tiers import thorough

aten = torch.ops.aten


def _traced(fn: Callable[[Tensor], Tensor], shapes: Shapes) -> Graph:
    with shapes.mode, torch.no_grad():
        graph = make_fx(fn, pre_dispatch=True)(torch.zeros(1, shapes.symbols["T"], 12)).graph
    graph.find_nodes(op="placeholder")[0].target = "x"
    return graph


def _run(graph: Graph, x: Tensor) -> Tensor:
    graph.find_nodes(op="placeholder")[0].target = "x"
    (result,) = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), graph)).run(x)
    return result


def _filled_in_place(x: Tensor) -> Tensor:
    made = x.new_empty(1, x.shape[1], 16)
    made[..., :12].copy_(x)
    made[..., 12:].copy_(x[..., :1].expand(-1, -1, 4))
    return made


BATCHED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": lambda x: x.view(1, -1, 3, 4).transpose(1, 2).mul(2).transpose(1, 2).reshape(1, -1, 12),
    "flat": lambda x: (x.view(-1, 12) + 1).view(1, -1, 12),
    "sums": lambda x: x.pow(2).mean(-1, keepdim=True) * x.sum(-1)[..., None] + x.softmax(-1),
    "products": lambda x: torch.matmul(x, x.new_ones(12, 5)).unsqueeze(1).squeeze(1),
    "parts": lambda x: torch.cat((-x[..., 6:], x.chunk(2, dim=-1)[0]), -1) * x.split([8, 4], -1)[1][..., :1],
    "stacked": lambda x: torch.stack((x, x + 1), dim=2).flatten(2).repeat(1, 1, 2),
    "one head": lambda x: x.view(1, -1, 1, 12).transpose(1, 2).expand(1, 4, -1, 12).permute(0, 2, 1, 3),
    "in place": lambda x: (x * 2).add_(x).mul_(3),
    "filled": _filled_in_place,
}


@pytest.mark.parametrize("name", BATCHED)
def test_unbatched(name: str) -> None:
    fn, shapes = BATCHED[name], Shapes("cpu")
    graph = _traced(fn, shapes)
    make_functional(graph, shapes)
    made = unbatched(graph, shapes)
    assert not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in made.nodes)
    x = torch.randn(5, 12)
    torch.testing.assert_close(_run(made, x), fn(x[None])[0])


def test_an_op_without_a_rule_gets_its_batch_back() -> None:
    made = unbatched(_traced(lambda x: x.flip(0), shapes := Shapes("cpu")), shapes)
    assert [n.target for n in made.nodes if n.op == "call_function"] == [
        aten.unsqueeze.default, aten.flip.default, aten.squeeze.dim,
    ]  # fmt: skip


def test_a_layer_of_llama_has_no_batch_dimension() -> None:
    from graphllm.compile.transformers_model.adoption import adopt

    config = tiny("llama")
    config.architectures = ["LlamaForCausalLM"]
    model = adopt(config.to_json_string(), 512)
    (recipe,) = model.layers.values()
    targets = [n.target for n in recipe.graph.nodes if n.op == "call_function"]
    assert not {aten.squeeze.dim, aten.sym_size.int} & {*targets}
    assert model.layer_types == ("full",) * 3
    results: Any = model.embed.graph.output_node().args[0]
    x, *shared = results
    assert [list(n.meta["val"].shape)[1:] for n in (x, *shared)] == [[64], [8], [8]]


def _written_later(x: Tensor) -> Tensor:
    y = x * 2
    z = y[..., :3]
    y.add_(1)
    return y[..., :3] + z


def _half_filled(x: Tensor) -> Tensor:
    made = x.new_zeros(1, x.shape[1], 16)
    made[..., :12].copy_(x)
    return made


@pytest.mark.parametrize("fn", [_written_later, _half_filled])
def test_a_write_that_others_see(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="others read"):
        make_functional(_traced(fn, shapes := Shapes("cpu")), shapes)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.cumsum(1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: torch.matmul(torch.matmul(x, x.transpose(1, 2)).softmax(-1), x),
        lambda x: x + x[:, -1:],
        lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1],
    ],
    ids=["sum of those before", "mean", "attention", "last", "shift"],
)
def test_tokens_that_meet_are_found(fn: Callable[[Tensor], Tensor]) -> None:
    shapes = Shapes("cpu")
    assert mixing(unbatched(_traced(fn, shapes), shapes), shapes)


def test_tokens_that_do_not_meet() -> None:
    shapes = Shapes("cpu")
    for fn in (BATCHED["heads"], BATCHED["sums"], lambda x: x.cumsum(2), lambda x: x.repeat_interleave(2, dim=1)):
        assert mixing(unbatched(_traced(fn, shapes), shapes), shapes) is None


def _refused(kind: str, **fields: Any) -> str:
    config = json.loads(tiny(kind).to_json_string()) | fields
    with pytest.raises(ConfigError) as raised:
        find_model(config).config(config)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "architecture", "said"),
    [
        ("gptj", "GPTJForCausalLM", "attention of its own, not by transformers' interface"),
        thorough("codegen", "CodeGenForCausalLM", r"attention of its own, which reads its mask \(modeling_codegen.py:"),
        thorough("bert", "BertLMHeadModel", "tokens see later ones"),
        thorough("jetmoe", "JetMoeForCausalLM", "cannot be traced"),
        thorough("minimax", "MiniMaxForCausalLM", "cache of its own"),
        thorough("recurrent_gemma", "RecurrentGemmaForCausalLM", "cannot be traced"),
        ("olmo2", "OlmoForCausalLM", "transformers' model that generates is Olmo2ForCausalLM"),
        ("dinov2", "Dinov2Model", "no causal language model"),
    ],
)
def test_refusals_name_what_blocks(kind: str, architecture: str, said: str) -> None:
    fields = {"architectures": [architecture], MODEL_IMPL: "transformers", "is_decoder": kind != "bert"}
    found = _refused(kind, **fields) if kind != "dinov2" else _of_vision(fields)
    assert said.split(r" \(")[0] in found
    assert "docs/adding-a-model.md" in found


def _of_vision(fields: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        find_model({"model_type": "dinov2", **fields})
    return str(raised.value)


# Sliding and full layers, a parallel residual, pairs that are turned; heads turned in part; biases and learned
# positions; norms after their sublayers; positions that are counted from 2; two caches in a layer; heads of two sizes.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        "cohere2", "stablelm", "gpt_neox", "olmo2", "olmo3", "starcoder2", "phi", "persimmon", "nemotron", "glm4",
        "smollm3", "helium", "exaone4", "ernie4_5", "seed_oss", "hunyuan_v1_dense", "arcee", "vaultgemma", "biogpt",
        "ctrl", "diffllama", "apertus", "granite_swa", "bitnet", "gemma4_text", "bart", "roberta", "youtu",
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    config = tiny(kind)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    runner = driver.Driver(tmp_path, "eager")
    assert difference(model, runner, config.vocab_size) < 2e-4
