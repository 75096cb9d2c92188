"""Qwen3.5 (text) and Qwen3.5-MoE: Qwen3-Next's layers, with the projections of a delta net stored apart. All layers of
the second have experts.

Rotary positions have three dimensions there, for images; they are equal in a text, which then is rotated as usual.
"""

from __future__ import annotations

from dataclasses import replace

from graphllm.config.fields import note, section
from graphllm.ir import Weight, register_model
from graphllm.model_defs import llama, qwen3_next
from graphllm.model_defs.common import HF, only
from graphllm.weights.plan.expr import Concat, Read

_DEFAULTS = {"num_key_value_heads": 4}
_MOE_DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8}


def from_hf(hf: HF) -> qwen3_next.Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    note(section(hf, "rope_parameters"), "mrope_section")
    if hf["architectures"][0] == "Qwen3_5ForCausalLM":
        return qwen3_next.from_hf({**_DEFAULTS, **hf, "num_experts": 0})
    only(hf, "norm_topk_prob", True)
    only(hf, "decoder_sparse_step", 1)
    only(hf, "mlp_only_layers", None, [])
    return qwen3_next.from_hf(_MOE_DEFAULTS | dict(hf), dense=False)


def layer_weights(c: qwen3_next.Config, layer_type: str) -> dict[str, Weight]:
    weights = qwen3_next.layer_weights(c, layer_type)
    if "qkvz" not in weights:
        return weights
    delta = llama.LAYER + "linear_attn.in_proj_"
    of = {"qkv": sum(c.parts), "z": c.parts[2]}
    parts = tuple(Read((f"{delta}{name}.weight",), (rows, c.D)) for name, rows in of.items())
    both = tuple(f"{delta}{name}.weight" for name in "ba")
    return weights | {
        "qkvz": replace(weights["qkvz"], expr=Concat(parts)),
        "beta_gate": replace(weights["beta_gate"], sources=both, expr=None),
    }


GRAPH = replace(qwen3_next.GRAPH, layer_weights=layer_weights)
MODEL = register_model(
    replace(
        qwen3_next.MODEL, architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), config=from_hf, graphs=(GRAPH,)
    )
)
