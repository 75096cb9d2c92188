"""The strange family: a decoder, an encoder where a feature needs one, and a pooled encoder of its own."""

from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm

from graphllm.ir import Graph, InputSpec, Model, StateSpec, Weight, register_model, select_rows
from graphllm.ir.model import Hidden
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.gemm.linear import linear
from strange import ops

D, V, WINDOW, PATCH, LEN = 32, 97, 12, 8, 96
LAYERS = ("recurrent", "latent", "window", "cross", "extern", "tables")  # features that are layers

CHUNK = 8
TABLES = (
    ("sequence_ids", ("T",), 0),
    ("fresh", ("S",), 0),
    ("num_decodes", (1,), 0),
    ("chunks", (f"T // {CHUNK} + S", 2), -1),
)


@dataclass(frozen=True)
class Config:
    features: tuple[str, ...]
    V: int = V
    max_len: int = LEN

    @property
    def layers(self):
        return ("full", *(f for f in self.features if f in LAYERS), "full")

    def has(self, *features):
        return any(f in self.features for f in features)


def _matrix(c, rows, inner, source):
    return Weight((rows, inner), (source,), encoding="block_int8" if c.has("encoded") else None)


def _embed(c, w, ctx):
    x_TD = torch.index_select(w.tokens, 0, ctx.inputs.token_ids)
    if c.has("image"):
        x_TD = ops.strange_placed(x_TD, ctx.state.memory, ctx.inputs.item_rows)
    if c.has("axes"):
        at_3T = ctx.inputs.axes + LEN * torch.arange(3, device=x_TD.device)[:, None]
        x_TD = x_TD + w.axes[at_3T].sum(0)
    return x_TD, ()


def _embed_weights(c):
    axes = {"axes": Weight((3 * LEN, D), (("axes",),))} if c.has("axes") else {}
    return {"tokens": Weight((V, D), (("embed",),)), **axes}


def _states(c, layer_type):
    table = (StateSpec("table", "adapter", (D,)),) if c.has("adapter") else ()
    own = {
        "recurrent": (
            StateSpec("tail", "slot", (ops.TAIL, D), retention="last"),
            StateSpec("total", "slot", (D,), "float64", "last"),
        ),
        "latent": (StateSpec("latent", "block", ("P", D), "int8"), StateSpec("scale", "block", ("P",), "float32")),
        "window": (kv_state(1, D, WINDOW),),
        "full": (kv_state(1, D, 0),),
    }
    return table + own.get(layer_type, ())


def _layer(c, layer_type, w, x_TD, ctx):
    given = ctx.inputs
    h_TD = linear(rms_norm(x_TD, (D,)), w.mix)
    if c.has("adapter"):
        h_TD = ops.strange_adapted(h_TD, x_TD, ctx.state.table, given.adapter_ids)
    if layer_type == "recurrent":
        state = ctx.state.tail, ctx.state.total
        out = ops.strange_recurrent(h_TD, *state, given.query_start_loc, given.slots, given.state_versions)
    elif layer_type == "latent":
        out = ops.strange_latent(h_TD, ctx.state.latent, ctx.state.scale, *ctx.attn)
    elif layer_type == "cross":
        out = ops.strange_cross(h_TD, ctx.state.memory, given.item_start, given.item_length, given.query_start_loc)
    elif layer_type == "tables":
        made = given.sequence_ids, given.fresh, given.num_decodes, given.chunks
        out = ops.strange_tables(h_TD, *made, given.query_start_loc, given.seq_lens, CHUNK)
    elif layer_type == "extern":
        centered_TD, mean_T = ops.strange_center(h_TD, 0.5)
        out = centered_TD * torch.tanh(mean_T)[:, None]
    else:
        h_THE = h_TD.view(-1, 1, D)
        window = WINDOW if layer_type == "window" else 0
        out = paged_attention(h_THE, h_THE, h_THE, ctx.state.kv, *ctx.attn, 1.0, window).view(-1, D)
    return x_TD + out


def _inputs(c):
    return (
        *((InputSpec("item_rows", ("T",), provider="item_rows", neutral=-1),) if c.has("image") else ()),
        *((InputSpec("axes", (3, "T"), provider="strange_axes", counts=True),) if c.has("axes") else ()),
        *((InputSpec("adapter_ids", ("T",), provider="adapter_ids"),) if c.has("adapter") else ()),
        *(InputSpec(n, ("S",), provider=n) for n in ("item_start", "item_length") if c.has("cross")),
        *(InputSpec(n, shape, provider=n, neutral=neutral) for n, shape, neutral in TABLES if c.has("tables")),
    )


decoder = Graph(
    layer_types=lambda c: c.layers,
    embed_weights=_embed_weights,
    layer_weights=lambda c, layer_type: {"mix": _matrix(c, D, D, "layers.{layer}.mix")},
    head_weights=lambda c: {"out": _matrix(c, V, D, "out")},
    embed=_embed,
    layer=_layer,
    head=lambda c, w, x_TD, ctx: linear(select_rows(x_TD, ctx.inputs.logits_indices), w.out),
    states=_states,
    inputs=_inputs,
)


def _attend(c, layer_type, w, x_TD, ctx):
    return x_TD + ops.strange_bidirectional(linear(rms_norm(x_TD, (D,)), w.mix), ctx.inputs.query_start_loc)


encoder = Graph(
    name="encoder",
    task="encode",
    layer_types=lambda c: ("all",),
    embed_weights=lambda c: {"patch": Weight((D, PATCH), (("encoder.patch",),))},
    layer_weights=lambda c, layer_type: {"mix": Weight((D, D), (("encoder.{layer}.mix",),))},
    head_weights=lambda c: {},
    embed=lambda c, w, ctx: (linear(ctx.inputs.patches, w.patch), ()),
    layer=_attend,
    head=lambda c, w, x_TD, ctx: ops.strange_remember(x_TD, ctx.state.memory, ctx.inputs.item_rows),
    inputs=lambda c: (
        InputSpec("patches", ("T", PATCH), "float32", provider="item"),
        InputSpec("item_rows", ("T",), provider="item_rows", neutral=-1),
    ),
)

for name, graphs in (("Strange", (decoder,)), ("StrangeEncoded", (decoder, encoder))):
    register_model(
        Model(
            architectures=(f"{name}ForCausalLM",),
            config=lambda hf: Config(tuple(hf["features"])),
            graphs=graphs,
            states=lambda c: (StateSpec("memory", "item", (D,)),) if c.has("cross", "image") else (),
        )
    )

register_model(
    Model(
        architectures=("StrangePooler",),
        config=lambda hf: Config(()),
        graphs=(
            Graph(
                task="pool",
                layer_types=lambda c: ("all", "all"),
                embed_weights=_embed_weights,
                layer_weights=lambda c, layer_type: {"mix": Weight((D, D), (("layers.{layer}.mix",),))},
                head_weights=lambda c: {},
                embed=_embed,
                layer=_attend,
                head=lambda c, w, x_TD, ctx: select_rows(x_TD, ctx.inputs.logits_indices),
            ),
        ),
    )
)


def _draft(c, w, ctx):
    x_TD = torch.index_select(w.tokens, 0, ctx.inputs.token_ids)
    return linear(torch.cat([x_TD, ctx.inputs.hidden], -1), w.join), ()


register_model(
    Model(
        architectures=("StrangeDraft",),
        config=lambda hf: Config(()),
        graphs=(
            Graph(
                task="draft",
                layer_types=lambda c: ("full",),
                embed_weights=lambda c: {
                    "tokens": Weight((V, D), (("embed",),)),
                    "join": Weight((D, 2 * D), (("join",),)),
                },
                layer_weights=lambda c, layer_type: {"mix": Weight((D, D), (("layers.{layer}.mix",),))},
                head_weights=lambda c: {"out": Weight((V, D), (("out",),))},
                embed=_draft,
                layer=_layer,
                head=decoder.head,
                states=_states,
                hidden=lambda c, layers: Hidden((1,), D, False, D),
            ),
        ),
    )
)
