"""Trace a model: embed, one layer of each kind, head and sampler, each once, on fake tensors with symbolic T and S."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.passes import Unit, results_of
from graphllm.config import CompileConfig
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead
from graphllm.ir.model import Attn, Model, Step
from graphllm.ir.weight import Weight
from graphllm.ops.sample import sample


def step_specs(config: CompileConfig) -> dict[str, TensorSpec]:
    """The step's inputs by name; `Step` and `sample` say what they mean. One page more than the longest context needs
    never occurs, so the block table is exactly max_model_len wide."""
    pages = -(-config.max_model_len // config.page_size)
    dense = TensorSpec.contiguous
    return {
        "step.token_ids": dense("int32", "T"),
        "step.positions": dense("int32", "T"),
        "step.context_len": dense("int32", "T"),
        "step.logit_rows": dense("int32", "S"),
        "step.query_start": dense("int32", "S + 1"),
        "step.seq_len": dense("int32", "S"),
        "step.block_table": dense("int32", "S", pages),
        "step.temperature": dense("float32", "S"),
        "step.top_k": dense("int32", "S"),
        "step.top_p": dense("float32", "S"),
        "step.min_p": dense("float32", "S"),
        "step.seed": dense("int64", "S"),
        "step.draw": dense("int32", "S"),
    }


def kv_spec(model_config: Any, config: CompileConfig, pages: int | str) -> TensorSpec:
    """One layer's cache: [pages, 2, K, P, E], see `paged_attention`."""
    shape = (2, model_config.K, config.page_size, model_config.E)
    return TensorSpec.contiguous(config.dtype, pages, *shape)


def trace_model(model: Model, c: Any, config: CompileConfig) -> list[Unit]:
    """The units of a model in program order: embed, each layer kind once, head, sample."""
    shapes = Shapes(config.target.device)
    specs = step_specs(config)
    # Any page count does: no piece depends on it. It is larger than 1 so that it is not mistaken for a broadcast.
    specs["kv"] = kv_spec(c, config, 64)

    def trace(name: str, extra: dict[str, TensorSpec], fn: Callable[[dict[str, Any]], Any]) -> Unit:
        inputs = {**specs, **extra}
        return trace_unit(name, inputs, fn, shapes)

    def weights(declared: dict[str, Weight]) -> dict[str, TensorSpec]:
        dtypes = {"model": config.dtype, "float32": "float32"}
        return {f"w.{n}": TensorSpec.contiguous(dtypes[w.dtype], *w.shape) for n, w in declared.items()}

    embed = trace("embed", weights(model.embed_weights(c)), lambda v: _flat(model.embed(c, _weights(v), _step(v))))
    carried = dict(zip(embed.outputs, output_specs(embed), strict=True))
    units = [embed]
    for kind in dict.fromkeys(model.kinds(c)):

        def layer(v: dict[str, Any], kind: str = kind) -> tuple[torch.Tensor]:
            return (model.layer(c, kind, _weights(v), v["x"], _shared(v), _step(v), v["kv"]),)

        units.append(trace(f"layer.{kind}", weights(model.layer_weights(c, kind)) | carried, layer))
    head = trace(
        "head",
        weights(model.head_weights(c)) | {"x": carried["x"]},
        lambda v: (model.head(c, _weights(v), v["x"], _step(v)),),
    )
    logits = output_specs(head)[0]
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "draw")
    sampler = trace("sample", {"x": logits}, lambda v: (sample(v["x"], *(v[f"step.{n}"] for n in names)),))
    return [*units, head, sampler]


def trace_unit(
    name: str, inputs: dict[str, TensorSpec], fn: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]], shapes: Shapes
) -> Unit:
    """Trace ``fn`` over named inputs. Inputs it does not read are left out of the unit."""
    names = list(inputs)
    fakes = [shapes.tensor(inputs[n]) for n in names]
    with shapes.mode, torch.no_grad():
        traced = make_fx(lambda *values: fn(dict(zip(names, values, strict=True))))(*fakes)
    graph = traced.graph
    for node, label in zip(list(graph.find_nodes(op="placeholder")), names, strict=True):
        node.meta["label"] = label
    eliminate_dead(graph)
    kept = tuple(n.meta["label"] for n in graph.find_nodes(op="placeholder"))
    unit = Unit(name, graph, kept, (), shapes)
    shared = tuple(f"shared.{i}" for i in range(len(results_of(unit)) - 1))
    return unit._replace(outputs=("x", *shared))


def output_specs(unit: Unit) -> list[TensorSpec]:
    """The specs of a unit's outputs."""
    return [unit.shapes.spec(n.meta["val"]) for n in results_of(unit)]


def _flat(result: tuple[torch.Tensor, tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return (result[0], *result[1])


def _weights(values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{n[2:]: v for n, v in values.items() if n.startswith("w.")})


def _shared(values: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(v for n, v in values.items() if n.startswith("shared."))


def _step(values: dict[str, Any]) -> Step:
    attn = Attn(*(values[f"step.{f}"] for f in Attn._fields))
    plain = {f: values[f"step.{f}"] for f in Step._fields if f != "attn"}
    return Step(**plain, attn=attn)
