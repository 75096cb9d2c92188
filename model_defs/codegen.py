"""CodeGen: GPT-J whose queries, values and keys are one matrix, stored as four quarters of the heads after another."""

from __future__ import annotations

from dataclasses import replace

from graphllm.config import ConfigError
from graphllm.ir import Weight, register_model
from graphllm.model_defs import gpt2, gptj
from graphllm.model_defs.common import HF, by_turns

_QUARTERS = 4  # the processors that it was trained on, whatever the size


def from_hf(hf: HF) -> gptj.Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    c = gptj.from_hf(hf)
    if c.H % _QUARTERS:
        raise ConfigError(f"config.json: n_head is {c.H}; set it to the checkpoint's, a multiple of {_QUARTERS}")
    return c


def layer_weights(c: gptj.Config, layer_type: str) -> dict[str, Weight]:
    weights, inner = gptj.layer_weights(c, layer_type), c.H * c.E
    (stored,) = gpt2.in_layer("attn.qkv_proj")("weight")
    expr = by_turns(stored, _QUARTERS, (inner // _QUARTERS,) * 3, c.D)
    return weights | {"qvk": replace(weights["qvk"], sources=(), expr=expr)}


register_model(
    replace(
        gptj.MODEL,
        architectures=("CodeGenForCausalLM",),
        config=from_hf,
        graphs=(replace(gptj.GRAPH, layer_weights=layer_weights),),
    )
)
