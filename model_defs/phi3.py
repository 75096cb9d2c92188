"""Phi-3 and Phi-4: Llama's layers, with merged projections in the checkpoint, LongRoPE and partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from graphllm.config.fields import MOST, number, section, switch, whole
from graphllm.ir import Weight, register_model
from graphllm.model_defs import llama
from graphllm.model_defs.common import HF, MOST_LAYERS, check_plain, head_dim, heads, only
from graphllm.ops.attention.rope_table import Rope


def from_hf(hf: HF) -> llama.Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    only(hf, "hidden_act", "silu")
    hf = {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096, "sliding_window": None} | dict(hf)
    scaling = section(hf, "rope_scaling") or section(hf, "rope_parameters")
    only({"rope_type": scaling.get("type"), **scaling}, "rope_type", None, "default", "longrope", "su")
    (H, K), E = heads(hf), head_dim(hf)
    window = whole(hf, "sliding_window", null=0, le=MOST)
    return llama.Config(
        D=whole(hf, "hidden_size"),
        H=H,
        K=K,
        E=E,
        F=whole(hf, "intermediate_size"),
        V=whole(hf, "vocab_size"),
        max_len=whole(hf, "max_position_embeddings", le=MOST),
        layer_types=("sliding" if window else "full",) * whole(hf, "num_hidden_layers", le=MOST_LAYERS),
        window=window,
        eps=number(hf, "rms_norm_eps", 1e-5, ge=0, le=1),
        scale=E**-0.5,
        rope=Rope.from_hf(hf, E, partly=True),
        tied=switch(hf, "tie_word_embeddings", False),
    )


def layer_weights(c: llama.Config, layer_type: str) -> dict[str, Weight]:
    qkv, gate_up = (f"{llama.LAYER}{name}_proj.weight" for name in ("self_attn.qkv", "mlp.gate_up"))
    parts = (c.H * c.E, c.K * c.E, c.K * c.E)
    return llama.layer_weights(c, layer_type) | {
        "qkv": Weight((sum(parts), c.D), (qkv,), parts, shard="output", heads=(c.H, c.K, c.K)),
        "gate_up": Weight((2 * c.F, c.D), (gate_up,), (c.F, c.F), shard="output"),
    }


register_model(
    replace(
        llama.MODEL,
        architectures=("Phi3ForCausalLM",),
        config=from_hf,
        graphs=(replace(llama.GRAPH, layer_weights=layer_weights),),
    )
)
