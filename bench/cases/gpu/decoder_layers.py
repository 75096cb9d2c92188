"""The layers of a small decoder in one CUDA graph, as in a decode step: which kernels are the fastest there.

All layers have weights and a cache of their own, so that nothing is in a cache of the GPU that would not be. Attention
and the linear layers are computed by one implementation after another with all launch constants it would be tuned over,
in turn, each by the time of the whole; first with the plan of attention that decode has, then with others. Figures are
us a layer, the fastest of a few replays of the whole, sequences of equal length. Results of all ways must agree.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Case
from graphllm.config import Bucket
from graphllm.host.machine import detect_target
from graphllm.ir.op import CallSite, Op
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.gemm.fused_linear import fused_linear
from graphllm.ops.gemm.linear_add_norm import linear_add_norm

CASES = [("decoder_layers", {"shape": "qwen3-0.6b", "sequences": (1, 16), "contexts": (256, 1024)})]
SHAPES = {  # layers, hidden, inner, query heads, heads of keys and values, head size
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128), "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128),
    "llama3.2-1b": (16, 2048, 8192, 32, 8, 64), "heads of 8B": (12, 1024, 3072, 32, 8, 128),
}  # fmt: skip
LONGEST = 8320  # tokens that a row of the block table has room for
EPS = 1e-6
# A linear layer, its weights, and what joins it. One row is normalized by the product that reads it.
APART = (("o", "residual"), ("gate_up", "norm gate"), ("down", "residual"), ("qkv", "norm"))
TOGETHER = (("o", "residual norm"), ("gate_up", "gate"), ("down", "residual norm"), ("qkv", ""))
Config = Mapping[str, Any]


class Choice(NamedTuple):
    """An implementation and its launch constants."""

    impl: str
    constants: Config


class Layer(NamedTuple):
    """What attention takes in addition to queries, keys and values, and the weights."""

    attention: dict[str, Any]
    weights: dict[str, Tensor]


class Model(NamedTuple):
    """All layers, with the tensor of lengths that they share."""

    layers: list[Layer]
    lengths: Tensor
    heads: tuple[int, int, int]  # of queries, of keys and values, their size

    def run(self, forms: tuple[tuple[str, str], ...], choices: Mapping[str, Choice]) -> Tensor:
        """The residual stream after all layers."""
        weights, T = self.layers[0].weights, len(self.lengths)
        x = weights["o"].new_ones(T, weights["o"].shape[0])
        qkv = x.new_ones(T, weights["qkv"].shape[0])
        for layer in self.layers:
            attended = self.attend(layer, qkv, choices["attention"])
            normed, residual = attended, x
            for name, joined in forms:
                made = call(*product(name, joined, layer.weights, normed, residual), choices[name])
                if "residual" in joined:
                    x = residual = made[0] if "norm" in joined else made
                normed = made[1] if isinstance(made, tuple) else made
            qkv = normed
        return x

    def attend(self, layer: Layer, qkv: Tensor, choice: Choice) -> Tensor:
        return call(paged_attention, self.attention(layer, qkv), choice).flatten(1)

    def attention(self, layer: Layer, qkv: Tensor) -> dict[str, Any]:
        H, K, E = self.heads
        heads = qkv.unflatten(1, (-1, E)).split([H, K, K], dim=1)
        return {**dict(zip(("q_THE", "k_TKE", "v_TKE"), heads, strict=True)), **layer.attention}


def model_of(shape: str, sequences: int, longest: int) -> Model:
    """Random weights and caches."""
    count, D, F, H, K, E = SHAPES[shape]
    draw = torch.Generator("cuda").manual_seed(0)
    blocks = -(-(longest + 1) // 16)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=draw, device="cuda").mul_(scale).bfloat16()

    def matrix(rows: int, inner: int) -> Tensor:
        return normal(rows, inner, scale=inner**-0.5)

    table = torch.zeros(sequences, LONGEST // 16, dtype=torch.int32, device="cuda")
    pages = torch.randperm(sequences * blocks, generator=draw, device="cuda")
    table[:, :blocks] = pages.view(sequences, blocks)
    angles = torch.rand(sequences, E // 2, generator=draw, device="cuda")
    lengths = torch.full((sequences,), longest, dtype=torch.int32, device="cuda")
    shared = {
        "block_table": table, "query_start_loc": torch.arange(sequences + 1, dtype=torch.int32, device="cuda"),
        "seq_lens": lengths, "scale": E**-0.5, "cos_TF": angles.cos(), "sin_TF": angles.sin(), "eps": EPS,
    }  # fmt: skip
    layers = [
        Layer(
            {**shared, "kv_cache": normal(sequences * blocks, 2, K, 16, E), "q_norm_E": normal(E),
             "k_norm_E": normal(E)},
            {"o": matrix(D, H * E), "gate_up": matrix(2 * F, D), "down": matrix(D, F),
             "qkv": matrix((H + 2 * K) * E, D),
             "inner norm": normal(D), "next norm": normal(D)},
        )
        for _ in range(count)
    ]  # fmt: skip
    return Model(layers, lengths, (H, K, E))


def product(
    name: str, joined: str, weights: dict[str, Tensor], x: Tensor, residual: Tensor
) -> tuple[Op, dict[str, Any]]:
    """The op that computes a linear layer, and its arguments."""
    given: dict[str, Any] = {"x_TI": x, "weight_OI": weights[name]}
    norm = weights["inner norm" if name in ("o", "gate_up") else "next norm"]
    if joined == "residual norm":
        return linear_add_norm, {**given, "residual_TO": residual, "norm_O": norm, "eps": EPS}
    if "norm" in joined:
        given |= {"norm_I": norm, "eps": EPS}
    if "residual" in joined:
        given["residual_TN"] = residual
    return fused_linear, {**given, "gated": "gate" in joined}


def call(op: Op, given: dict[str, Any], choice: Choice) -> Any:
    """An implementation takes the arguments of the op that it names."""
    return op.impls[choice.impl].fn(**op.bind((), given), **choice.constants)


def choices_of(op: Op, given: dict[str, Any], sequences: int) -> list[Choice]:
    """Our kernels for a call, with all constants worth trying."""
    site = CallSite(op.bind((), given), detect_target("cuda"), Bucket("decode", sequences, sequences))
    impls = (i for i in op.impls.values() if i.device == "cuda" and i.name != "cublas" and i.supports(site))
    return [Choice(impl.name, config) for impl in impls for config in impl.configs(site)]


def plans(usual: Config) -> Iterator[Choice]:
    """Of decode attention: as it is, and with fewer or more bytes under way, sooner or later."""
    yield Choice("triton_decode", usual)
    tried = itertools.product((1, 2, usual["min_tiles"]), (0, 1), (1, 2), (32, 64))
    for tiles, early, stages, block_n in dict.fromkeys(tried):
        constants = {"min_tiles": tiles, "early": early, "stages": stages, "block_n": block_n}
        if block_n // usual["heads"] >= 16:
            yield Choice("triton_decode", {**usual, **constants})


class Captured(NamedTuple):
    """A graph of all layers and its result."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def us(self, layers: int, calls: int = 20) -> float:
        """Of a layer, in the mean of some replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        begin.record()
        for _ in range(calls):
            self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / calls / layers


def capture(model: Model, forms: tuple[tuple[str, str], ...], choices: Mapping[str, Choice]) -> Captured:
    """Compiles what is not yet compiled."""
    model._replace(layers=model.layers[:1]).run(forms, choices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model.run(forms, choices)
    return Captured(graph, result)


def measure(shape: str, sequences: int, contexts: list[int]) -> dict[str, Any]:
    """us a layer, by form, kernel and context; kernels are chosen at the first context."""
    model = model_of(shape, sequences, max(contexts))
    layers, first = model.layers, model.layers[0]
    found: dict[str, Any] = {}
    results: list[Tensor] = []
    for form, forms in (("norms apart", APART), *((("norms joined", TOGETHER),) if sequences > 1 else ())):
        model.lengths.fill_(contexts[0])
        x = first.weights["o"].new_ones(sequences, first.weights["o"].shape[0])
        tried: dict[str, list[Choice]] = {}
        for name, joined in forms:
            inner = x.new_ones(sequences, first.weights[name].shape[1])
            tried[name] = choices_of(*product(name, joined, first.weights, inner, x), sequences)
        given = model.attention(first, x.new_ones(sequences, first.weights["qkv"].shape[0]))
        (usual,) = (c for c in choices_of(paged_attention, given, sequences) if c.impl == "triton_decode")
        tried["attention"] = list(plans({"early": 0, **usual.constants}))
        chosen = {name: some[0] for name, some in tried.items()}
        times: dict[str, Any] = {}
        for name, some in tried.items():
            us = [capture(model, forms, chosen | {name: choice}).us(len(layers)) for choice in some]
            chosen[name] = some[us.index(min(us))]
            times[name] = [[round(t, 2), c.impl, dict(c.constants)] for t, c in zip(us, some, strict=True)]
        for plan in (tried["attention"][0], chosen["attention"]):
            captured = capture(model, forms, chosen | {"attention": plan})
            for context in contexts:
                model.lengths.fill_(context)
                us_of_rounds = [captured.us(len(layers)) for _ in range(5)]
                key = f"{form}, {context} tokens, {'usual' if plan is tried['attention'][0] else 'best'} plan"
                found[key] = round(statistics.median(us_of_rounds), 2)
            results.append(captured.result.float())
        found[f"{form}, tried"] = times
        found[f"{form}, chosen"] = {n: [c.impl, dict(c.constants)] for n, c in chosen.items()}
    found["largest difference"] = max(((r - results[0]).norm() / results[0].norm()).item() for r in results)
    return found


def run(case: Case) -> Iterator[dict[str, Any]]:
    """By number of sequences."""
    for sequences in case.sequences:
        yield {f"{case.shape}, {sequences} sequences": measure(case.shape, sequences, list(case.contexts))}
