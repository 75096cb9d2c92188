"""Trace a model: embed, one layer of each kind, head, and the sampling program around it, each once, on fake tensors
with symbolic T and S."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.config import CompileConfig
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead
from graphllm.ir.model import Attn, Model, Step
from graphllm.ir.weight import Weight
from graphllm.ops.adjust_logits import adjust_logits
from graphllm.ops.record_tokens import record_tokens
from graphllm.ops.sample import sample
from graphllm.ops.token_logprobs import token_logprobs
from graphllm.rewrite import Unit, results_of


def step_specs(config: CompileConfig, vocab: int, groups: int = 1) -> dict[str, TensorSpec]:
    """The step's inputs by name, in the order in which they are staged; `Step`, `sample`, `adjust_logits` and
    `token_logprobs` say what they mean.

    groups: cache groups, each with a block table of its own. A block table is exactly max_model_len wide. The mask
    comes last, so that steps without one need not copy it.
    """
    pages = -(-config.max_model_len // config.block_size)
    dense = TensorSpec.contiguous
    tables = {f"step.block_table.{g}": dense("int32", "S", pages) for g in range(groups)}
    ints = ("top_k", "draw", "slot", "counted", "mask_row", "bias_count", "target", "wanted")
    floats = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
    return {
        "step.token_ids": dense("int32", "T"),
        "step.positions": dense("int32", "T"),
        "step.context_len": dense("int32", "T"),
        "step.logits_indices": dense("int32", "S"),
        "step.query_start_loc": dense("int32", "S + 1"),
        "step.seq_lens": dense("int32", "S"),
        **tables,
        "step.seed": dense("int64", "S"),
        **{f"step.{n}": dense("int32", "S") for n in ints},
        **{f"step.{n}": dense("float32", "S") for n in floats},
        "step.mask": dense("int32", "S", -(-vocab // 32)),
    }


def state_specs(config: CompileConfig, vocab: int) -> dict[str, TensorSpec]:
    """What stays on the device between steps, by slot; the last slot is scrap, for padding rows."""
    slots, dense = config.max_num_seqs + 1, TensorSpec.contiguous
    return {
        "state.last_token": dense("int32", slots),
        "state.counts": dense("int32", slots, vocab),
        "state.bias_token": dense("int32", slots, config.max_logit_bias),
        "state.bias_value": dense("float32", slots, config.max_logit_bias),
    }


def kv_spec(model_config: Any, config: CompileConfig, pages: int | str) -> TensorSpec:
    """One layer's cache: [pages, 2, K, P, E], see `paged_attention`."""
    shape = (2, model_config.K, config.block_size, model_config.E)
    return TensorSpec.contiguous(config.dtype, pages, *shape)


def trace_model(model: Model, c: Any, config: CompileConfig) -> list[Unit]:
    """The units of a model in program order: feed, embed, each layer kind once, head, and the sampling program's:
    "sample", or "adjust", "sample_adjusted" and "logprobs"."""
    shapes = Shapes(config.target.device)
    specs = step_specs(config, c.V) | state_specs(config, c.V)
    specs["step.block_table"] = specs.pop("step.block_table.0")  # linking says which group's
    # Any page count does: no piece depends on it. It is larger than 1 so that it is not mistaken for a broadcast.
    specs["kv"] = kv_spec(c, config, 64)

    def trace(
        name: str,
        extra: dict[str, TensorSpec],
        fn: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]],
        output: str = "x",
        layers: tuple[int, ...] = (),
    ) -> Unit:
        return trace_unit(name, {**specs, **extra}, fn, shapes, output, layers)

    def weights(declared: dict[str, Weight]) -> dict[str, TensorSpec]:
        dtypes = {"model": config.dtype, "float32": "float32"}
        return {f"w.{n}": TensorSpec.contiguous(dtypes[w.dtype], *w.shape) for n, w in declared.items()}

    feed = trace("feed", {}, _feed, "step.token_ids")
    embed = trace("embed", weights(model.embed_weights(c)), lambda v: _flat(model.embed(c, _weights(v), _step(v))))
    carried = dict(zip(embed.outputs, output_specs(embed), strict=True))
    units = [feed, embed]
    kinds = model.kinds(c)
    for kind in dict.fromkeys(kinds):

        def layer(v: dict[str, Any], kind: str = kind) -> tuple[torch.Tensor]:
            return (model.layer(c, kind, _weights(v), v["x"], _shared(v), _step(v), v["kv"]),)

        layers = tuple(i for i, of in enumerate(kinds) if of == kind)
        extra = weights(model.layer_weights(c, kind)) | carried
        units.append(trace(f"layer.{kind}", extra, layer, layers=layers))
    head = trace(
        "head",
        weights(model.head_weights(c)) | {"x": carried["x"]},
        lambda v: (model.head(c, _weights(v), v["x"], _step(v)),),
        "logits",
    )
    logits = {"logits": output_specs(head)[0]}
    sample = trace("sample", logits, lambda v: _sample(v, "logits"), "tokens")
    adjust = trace("adjust", logits, _adjust, "adjusted")
    adjusted = {"adjusted": output_specs(adjust)[0]}
    sample_adjusted = trace("sample_adjusted", adjusted, lambda v: _sample(v, "adjusted"), "tokens")
    tokens = {"tokens": output_specs(sample)[0]}
    k = config.max_logprobs
    logprobs = trace(
        "logprobs",
        logits | tokens,
        lambda v: (token_logprobs(v["logits"], v["tokens"], v["step.target"], v["step.wanted"], k),),
        "scores",
    )
    return [*units, head, sample, adjust, sample_adjusted, logprobs]


def _feed(v: dict[str, Any]) -> tuple[torch.Tensor]:
    """A negative id -(slot + 1) stands for the token last sampled for that slot, which the host does not know yet.

    That one is -1 where none could be chosen: the host will end the request, whose next step must not fail before.
    """
    ids_T = v["step.token_ids"]
    last_T = torch.index_select(v["state.last_token"], 0, (-1 - ids_T).clamp(min=0)).clamp(min=0)
    return (torch.where(ids_T < 0, last_T, ids_T),)


def _sample(v: dict[str, Any], logits: str) -> tuple[torch.Tensor]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "draw")
    tokens_S = sample(v[logits], *(v[f"step.{n}"] for n in names))
    state = (v["state.last_token"], v["state.counts"])
    return (record_tokens(tokens_S, v["step.slot"], v["step.counted"], *state),)


def _adjust(v: dict[str, Any]) -> tuple[torch.Tensor]:
    rows = ("slot", "mask_row", "mask", "bias_count", "repetition", "frequency", "presence")
    state = ("counts", "bias_token", "bias_value")
    return (adjust_logits(v["logits"], *(v[f"step.{n}"] for n in rows), *(v[f"state.{n}"] for n in state)),)


def trace_unit(
    name: str,
    inputs: dict[str, TensorSpec],
    fn: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]],
    shapes: Shapes,
    output: str = "x",
    layers: tuple[int, ...] = (),
) -> Unit:
    """Trace ``fn`` over named inputs. Inputs it does not read are left out of the unit.

    output: name of the first result; further ones are "shared.<i>". layers: see `Unit`.
    """
    names = list(inputs)
    fakes = [shapes.tensor(inputs[n]) for n in names]
    with shapes.mode, torch.no_grad():
        traced = make_fx(lambda *values: fn(dict(zip(names, values, strict=True))))(*fakes)
    graph = traced.graph
    for node, label in zip(list(graph.find_nodes(op="placeholder")), names, strict=True):
        node.meta["label"] = label
    eliminate_dead(graph)
    unit = Unit(name, graph, (), shapes, layers=layers)
    shared = tuple(f"shared.{i}" for i in range(len(results_of(unit)) - 1))
    return unit._replace(outputs=(output, *shared))


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
