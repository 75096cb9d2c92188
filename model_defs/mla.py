"""Multi-head latent attention, as DeepSeek-V2 and its relatives have it: keys and values of all heads are made of one
latent a token, which is all that is kept of it but for a rotated part of its key.

Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight
from graphllm.model_defs.common import HF, LARGEST_HEAD
from graphllm.model_defs.llama import LAYER
from graphllm.ops.attention.latent_attention import LatentRows, latent_attention, latent_state
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table.frequencies import softmax_factor
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.weights.plan.expr import Pad, Read, Reshape, Slice

# What DeepSeek's files leave out.
_SIZES: dict[str, int] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
SHARDABLE = ("mla.H",)  # where the family's Config has an `Attention` as its field mla
_EPS = 1e-6  # of the norms of both latents, whatever the config says of others


@dataclass(frozen=True)
class Attention:
    """Sizes of the attention of a layer.

    D: width of the stream.
    H: heads.
    Q: numbers of the latent that queries are made of, 0 where they are made of the stream itself.
    L: numbers of the latent that keys and values are made of.
    N: numbers of a head's queries and keys without positions.
    R: rotated ones, which keys of all heads share.
    V: numbers of a head's values.
    scale: factor of the products of queries and keys.
    bias: whether the projections from the stream to latents, and that back to it, have one.
    interleaved: whether neighbours are rotated together, else entries half of R apart.
    rotary: whether the R numbers are rotated at all, by the tables that every layer reads.
    """

    D: int
    H: int
    Q: int
    L: int
    N: int
    R: int
    V: int
    scale: float
    bias: bool
    interleaved: bool
    rotary: bool = True

    @property
    def query_rows(self) -> int:
        """Rows of the matrix that makes queries."""
        return self.H * (self.N + self.R)


def from_hf(hf: HF, interleaved: bool) -> Attention:
    """The attention of a ``config.json``. interleaved: see `Attention`. Raises ConfigError for settings that are not
    supported."""
    hf = {**_SIZES, **hf}
    L, N, R, V = (whole(hf, name, le=LARGEST_HEAD) for name in tuple(_SIZES)[1:])
    return Attention(
        D=whole(hf, "hidden_size"),
        H=whole(hf, "num_attention_heads"),
        Q=whole(hf, "q_lora_rank", null=0),
        L=L,
        N=N,
        R=R,
        V=V,
        scale=(N + R) ** -0.5 * softmax_factor(hf),
        bias=switch(hf, "attention_bias", False),
        interleaved=interleaved,
    )


def weights(a: Attention) -> dict[str, Weight]:
    """Those of a layer's attention, and its two norms."""
    of, rows, rest = LAYER + "self_attn.", a.query_rows, a.L + a.R
    stored = Read((of + "kv_b_proj.weight",), (a.H * (a.N + a.V), a.L))
    by_head = Reshape(stored, (a.H, a.N + a.V, a.L))
    kv = of + "kv_a_proj_with_mqa"
    found = {
        "attn_norm": Weight((a.D,), (LAYER + "input_layernorm.weight",)),
        "ffn_norm": Weight((a.D,), (LAYER + "post_attention_layernorm.weight",)),
        "kv_norm": Weight((a.L,), (of + "kv_a_layernorm.weight",)),
        "k_up": Weight((a.H, a.N, a.L), expr=Slice(by_head, 1, 0, a.N), shard="output"),
        "v_up": Weight((a.H, a.V, a.L), expr=Slice(by_head, 1, a.N, a.N + a.V), shard="output"),
        "o": Weight((a.D, a.H * a.V), (of + "o_proj.weight",), shard="input"),
    }
    if a.Q:
        found["q_kv"] = Weight((a.Q + rest, a.D), (of + "q_a_proj.weight", kv + ".weight"), (a.Q, rest))
        found["q_norm"] = Weight((a.Q,), (of + "q_a_layernorm.weight",))
        found["q_b"] = Weight((rows, a.Q), (of + "q_b_proj.weight",), shard="output", heads=(a.H,))
    else:
        parts, sources = (rows, rest), (of + "q_proj.weight", kv + ".weight")
        found["q_kv"] = Weight((rows + rest, a.D), sources, parts, shard="output", heads=(a.H, 1))
    if a.bias:
        found["o_bias"] = Weight((a.D,), (of + "o_proj.bias",))
    if a.bias and a.Q:
        found["q_kv_bias"] = Weight((a.Q + rest,), (of + "q_a_proj.bias", kv + ".bias"), (a.Q, rest))
    elif a.bias:
        own = Pad(Read((kv + ".bias",), (rest,)), 0, rows, 0)
        found["q_kv_bias"] = Weight((rows + rest,), (), (rows, rest), expr=own, shard="output", heads=(a.H, 1))
    return found


def states(a: Attention) -> tuple[StateSpec, ...]:
    return (latent_state(a.L, a.R),)


def project(a: Attention, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> tuple[Tensor, LatentRows]:
    """Of normalized rows what queries are made of, and what attention takes."""
    merged = linear(h_TD, w.q_kv, getattr(w, "q_kv_bias", None))
    q, latent_TL, k_rope_TR = merged.split((a.Q or a.query_rows, a.L, a.R), 1)
    source = rms_norm(q, w.q_norm, _EPS) if a.Q else h_TD
    if a.Q:
        q = linear(source, w.q_b)
    q_nope_THN, q_rope_THR = q.unflatten(1, (a.H, a.N + a.R)).split((a.N, a.R), 2)
    if a.rotary:
        q_rope_THR = rope(q_rope_THR, *ctx.shared, interleaved=a.interleaved)
        k_rope_TR = rope(k_rope_TR.unsqueeze(1), *ctx.shared, interleaved=a.interleaved).squeeze(1)
    return source, LatentRows(q_nope_THN, q_rope_THR, rms_norm(latent_TL, w.kv_norm, _EPS), k_rope_TR)


def attend(a: Attention, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """The attention of a layer, from normalized rows to what is added to the stream."""
    _, rows = project(a, w, h_TD, ctx)
    out_THV = latent_attention(*rows, w.k_up, w.v_up, ctx.state.latent, *ctx.attn, scale=a.scale)
    return linear(out_THV.flatten(1), w.o, getattr(w, "o_bias", None))
