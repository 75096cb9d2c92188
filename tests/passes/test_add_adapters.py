"""add_adapters: experts, the embedding and the head have tables where they are asked for, in whatever their weights are
encoded, and an implementation for a GPU takes each call; programs for steps without adapters have none of it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from graphllm.compile.families import find_model
from graphllm.compile.layout import plan_layout, with_added
from graphllm.compile.link import Linked, link
from graphllm.compile.package import piece_buckets
from graphllm.compile.passes import pipeline
from graphllm.compile.pieces import require_implementations
from graphllm.compile.pipeline import run_passes
from graphllm.compile.rewrites.split_layers import split_layers
from graphllm.compile.trace import trace_model
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.op import op_of
from graphllm.ir.registry import load_ops, load_passes
from graphllm.program.schema import NEUTRAL
from graphllm.weights.plan.plan import make_plan
from tests.tiers import thorough

GPU = Target("cuda", ("sm_90", "sms_132"), "H200")
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, 64), Bucket("mixed", 2, 512))
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True,
}  # fmt: skip
load_ops()
load_passes()


def _linked(config: CompileConfig) -> tuple[Linked, list[str]]:
    """The linked model, in which all calls have an implementation; and what has tables."""
    hf = transformers.MixtralConfig(**SIZES).to_dict() | {"architectures": ["MixtralForCausalLM"]}
    model = find_model(hf)
    c = model.config(hf)
    plan = make_plan(model, c, config.dtype)
    layout = plan_layout(model, c, config)
    graphs = [split_layers(graph, plan, config) for graph in trace_model(layout)]
    traced = run_passes([u for graph in graphs for u in graph.units.values()], plan, config, pipeline().units)
    layout = with_added(layout, traced.added, config)
    linked = link(graphs, layout, config)
    jobs = piece_buckets(graphs, linked)
    require_implementations(((linked.pieces[id].json, bucket) for id, bucket in jobs), config)
    return linked, [s.name for _, report in traced.added for s in report.states]


def _ops(linked: Linked, program: str) -> dict[str, dict[str, Any]]:
    """The arguments of some call of each op in a program."""
    pieces = [linked.pieces[call.piece] for call in linked.programs[0][program].calls]
    nodes = [(op_of(n.target), n) for piece in pieces for n in piece.graph.nodes]
    return {op.name: op.bind(n.args, n.kwargs) for op, n in nodes if op is not None}


@pytest.mark.parametrize("quantization", [None, thorough("int8"), "int4", thorough("fp8"), thorough("mxfp4")])
def test_experts_embedding_and_head(quantization: Any) -> None:
    wanted = ("experts", "embed_tokens", "lm_head", "q_proj")
    config = CompileConfig(
        GPU, buckets=BUCKETS, enable_lora=True, max_loras=2, lora_target_modules=wanted, quantization=quantization
    )
    linked, states = _linked(config)
    assert states == [f"{n}.lora_{m}" for n in ("embed.tokens", "qkv", "gate_up", "down", "head.lm_head") for m in "ab"]
    ops = _ops(linked, "full")
    assert {"add_embedding_lora", "add_lora", "fused_moe"} <= set(ops)
    assert ops["fused_moe"]["adapter_ids_T"] is not None
    assert bool(ops["fused_moe"]["form"]) == (quantization is not None)
    plain = _ops(linked, "full" + NEUTRAL)
    assert not {"add_embedding_lora", "add_lora"} & set(plain)
    assert plain["fused_moe"]["adapter_ids_T"] is None
    assert plain["fused_moe"]["down_lora_b_LNrD"] is None
    assert linked.optional == [["adapter_ids", "row_adapter_ids"]]


@pytest.mark.thorough
def test_by_default_only_linear_layers() -> None:
    linked, states = _linked(CompileConfig(GPU, buckets=BUCKETS, enable_lora=True))
    assert states == [f"{n}.lora_{m}" for n in ("qkv", "o") for m in "ab"]
    assert _ops(linked, "full")["fused_moe"]["adapter_ids_T"] is None


def test_steps_without_adapters_run_what_a_model_without_tables_runs() -> None:
    """The same pieces in the same order, so that they take as long: a benchmark's difference is in its order."""
    linked, _ = _linked(CompileConfig(GPU, buckets=BUCKETS, enable_lora=True))
    plain, states = _linked(CompileConfig(GPU, buckets=BUCKETS))
    assert not states
    for name in plain.programs[0]:
        calls = [call.piece for call in linked.programs[0][name + NEUTRAL].calls]
        assert calls == [call.piece for call in plain.programs[0][name].calls]
