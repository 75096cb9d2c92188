"""The layers of a small decoder for one token on one GPU: a kernel for each linear layer, or one for all up to the next
attention (`linear_chain`).

    python bench/decoder_layers.py [--shape qwen3-0.6b] [--contexts 256,1024,4096] [--out FILE.json]

All layers run in one CUDA graph, as in a step, each with weights and a cache of its own, so that nothing is in a cache
that would not be. Launch constants are chosen one kernel after another, by the time of the whole. Figures are us a
layer, medians of rounds in turns, and the time in which 4.27 TB/s move the weights alone. Both ways must give the same
residual stream up to rounding, and the one kernel the same numbers in every replay.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from graphllm.config import Bucket
from graphllm.ir.op import CallSite, Op
from graphllm.machine import detect_target
from graphllm.ops.fused_linear import fused_linear
from graphllm.ops.linear_chain import linear_chain
from graphllm.ops.paged_attention.triton_decode import plan_splits
from graphllm.ops.rope_attention import rope_attention

BANDWIDTH = 4.27e12
SHAPES = {  # layers, hidden, inner, query heads, heads of keys and values, head size
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128), "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128),
    "llama3.2-1b": (16, 2048, 8192, 32, 8, 64), "tiny": (2, 64, 96, 4, 2, 32),
}  # fmt: skip
Config = Mapping[str, Any]


class Layer(NamedTuple):
    """Arguments of attention, and of the linear layers behind it but for x."""

    attention: dict[str, Any]
    chain: dict[str, Any]


def layers_of(shape: str, length: int, device: str, dtype: torch.dtype) -> list[Layer]:
    """Random weights and caches for one sequence of that length."""
    count, D, F, H, K, E = SHAPES[shape]
    draw = torch.Generator(device).manual_seed(0)
    blocks = -(-length // 16)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=draw, device=device).mul_(scale).to(dtype)

    def matrix(rows: int, inner: int) -> Tensor:
        return normal(rows, inner, scale=inner**-0.5)

    angles = torch.rand(1, E // 2, generator=draw, device=device)
    shared = {
        "block_table": torch.randperm(blocks, generator=draw, device=device).to(torch.int32)[None],
        "query_start_loc": torch.tensor([0, 1], device=device, dtype=torch.int32),
        "seq_lens": torch.tensor([length], device=device, dtype=torch.int32), "scale": E**-0.5,
        "cos_TF": angles.cos(), "sin_TF": angles.sin(), "eps": 1e-6,
    }  # fmt: skip
    return [
        Layer(
            shared | {"kv_cache": normal(blocks, 2, K, 16, E), "q_norm_E": normal(E), "k_norm_E": normal(E)},
            {
                "o_DA": matrix(D, H * E), "norm_D": normal(D), "gate_up_2FD": matrix(2 * F, D),
                "down_DF": matrix(D, F), "next_norm_D": normal(D), "qkv_QD": matrix((H + 2 * K) * E, D),
                "eps": 1e-6, "next_eps": 1e-6,
            },
        )
        for _ in range(count)
    ]  # fmt: skip


def attend(layer: Layer, qkv_TQ: Tensor, plan: Config) -> Tensor:
    """Attention over the layer's cache: [T, A]."""
    K, E = layer.attention["kv_cache"].shape[2], layer.attention["kv_cache"].shape[4]
    heads = qkv_TQ.unflatten(1, (-1, E)).split([qkv_TQ.shape[1] // E - 2 * K, K, K], dim=1)
    named = dict(zip(("q_THE", "k_TKE", "v_TKE"), heads, strict=True))
    given = rope_attention.bind((), {**named, **layer.attention})
    return rope_attention.impls["triton_decode"].fn(**given, **plan).flatten(1)


def apart(x: Tensor, r: Tensor, c: dict[str, Any], configs: Mapping[str, Config]) -> tuple[Tensor, Tensor]:
    """`linear_chain` by a kernel for each layer."""

    def linear(name: str, x: Tensor, **others: Any) -> Tensor:
        given = fused_linear.bind((), {"x_TI": x, "weight_OI": c[name], **others})
        return fused_linear.impls["triton_row"].fn(**given, **configs[name])

    y = linear("o_DA", x, residual_TN=r)
    gated = linear("gate_up_2FD", y, norm_I=c["norm_D"], eps=c["eps"], gated=True)
    out = linear("down_DF", gated, residual_TN=y)
    return out, linear("qkv_QD", out, norm_I=c["next_norm_D"], eps=c["next_eps"])


def together(x: Tensor, r: Tensor, c: dict[str, Any], configs: Mapping[str, Config]) -> tuple[Tensor, Tensor]:
    """By one kernel."""
    return linear_chain.impls["triton_chain"].fn(x_TA=x, residual_TD=r, **c, bias_Q=None, **configs["chain"])


Way = Callable[[Tensor, Tensor, dict[str, Any], Mapping[str, Config]], tuple[Tensor, Tensor]]


def run(layers: list[Layer], way: Way, configs: Mapping[str, Config]) -> Tensor:
    """The residual stream behind all layers."""
    like = layers[0].chain["qkv_QD"]
    r, qkv = like.new_ones(1, like.shape[1]), like.new_ones(1, like.shape[0])
    for layer in layers:
        r, qkv = way(attend(layer, qkv, configs["attention"]), r, layer.chain, configs)
    return r


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


def capture(layers: list[Layer], way: Way, configs: Mapping[str, Config]) -> Captured:
    """Compiles what is not yet compiled."""
    run(layers[:1], way, configs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(layers, way, configs)
    return Captured(graph, result)


def site(op: Op, given: dict[str, Any]) -> CallSite:
    return CallSite(op.bind((), given), detect_target("cuda"), Bucket("decode", 1, 1))


def plans(layers: list[Layer], H: int) -> list[Config]:
    """Plans of attention to try: the engine's, and with shorter or longer ranges, and more warps."""
    cache = layers[0].attention["kv_cache"]
    usual = plan_splits(1, H, cache.shape[2], 8320, cache.dtype, cache.shape[4])
    others = [{**usual, "min_tiles": tiles, "warps": warps} for tiles in (1, 2, 4) for warps in (4, 8)]
    return [usual, *(plan for plan in others if plan != usual)]


def best(layers: list[Layer], way: Way, configs: dict[str, Config], tried: Mapping[str, list[Config]]) -> Any:
    """Choose the constants of each kernel in turn; the time of each that was tried, in us a layer."""
    times: dict[str, dict[str, float]] = {}
    for name, some in tried.items():
        times[name] = {}
        for config in some:
            captured = capture(layers, way, configs | {name: config})
            times[name][str(dict(config))] = round(min(captured.us(len(layers)) for _ in range(5)), 2)
        configs[name] = some[min(range(len(some)), key=list(times[name].values()).__getitem__)]
    return times


def measure(shape: str, length: int) -> dict[str, Any]:
    """Both ways over one sequence."""
    layers = layers_of(shape, length, "cuda", torch.bfloat16)
    H = SHAPES[shape][3]
    c = layers[0].chain
    rows = {}
    for name in ("o_DA", "gate_up_2FD", "down_DF", "qkv_QD"):
        at = site(fused_linear, {"x_TI": c[name][:1], "weight_OI": c[name]})
        rows[name] = fused_linear.impls["triton_row"].configs(at)
    chain = linear_chain.impls["triton_chain"].configs(
        site(linear_chain, {**c, "x_TA": c["o_DA"][:1], "residual_TD": c["qkv_QD"][:1]})
    )
    attention = plans(layers, H)
    a: dict[str, Config] = {"attention": attention[0], **{name: some[0] for name, some in rows.items()}}
    b: dict[str, Config] = {"attention": attention[0], "chain": chain[0]}
    tried = {"apart": best(layers, apart, a, {**rows, "attention": attention})}
    tried["together"] = best(layers, together, b, {"chain": list(chain), "attention": attention})
    graphs = {
        "apart, plan of the engine": capture(layers, apart, a | {"attention": attention[0]}),
        "apart": capture(layers, apart, a),
        "together, plan of the engine": capture(layers, together, b | {"attention": attention[0]}),
        "together": capture(layers, together, b),
    }
    rounds = [{name: g.us(len(layers)) for name, g in graphs.items()} for _ in range(9)]
    expected = graphs["apart"].result.float()
    different = 0
    first = graphs["together"].result.clone()
    for _ in range(300):
        graphs["together"].graph.replay()
        different += not torch.equal(graphs["together"].result, first)
    error = ((first.float() - expected).norm() / expected.norm()).item()
    weights = sum(t.numel() * t.element_size() for t in c.values() if isinstance(t, Tensor))
    us = {name: round(statistics.median(r[name] for r in rounds), 2) for name in graphs}
    return {
        "us a layer": us, "bytes alone": round(1e6 * weights / BANDWIDTH, 2), "error": error,
        "replays that differ": different, "chosen": {"apart": a, "together": b}, "tried": tried,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }  # fmt: skip
    for length in map(int, args.contexts.split(",")):
        found[f"{args.shape}, {length} tokens"] = one = measure(args.shape, length)
        print(args.shape, length, json.dumps({k: v for k, v in one.items() if k not in ("tried",)}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
