"""MLP speculators: one narrow layer for each draft, over the previous draft's state and token.

As in the checkpoints ibm-ai-platform/*-accelerator. All drafts are made in one run, each from the likeliest token of
the one before. Source: Wertheimer et al. 2024, Accelerating Production LLMs with Combined Token/Embedding Speculators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import gelu

from graphllm.config.fields import switch, whole
from graphllm.ir import ForwardContext, Model, Weight, register_model, select_rows
from graphllm.ir.model import Drafts
from graphllm.model_defs import medusa
from graphllm.model_defs.common import HF
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear

_MOST = 64
_EPS = 1e-6


@dataclass(frozen=True)
class Config:
    """D: width of the model. S: of the speculator's state. drafts: of one run. tied: all share one embedding, norm and
    head, and all but the first one projection. scaled: the model's hidden state is normalized first."""

    D: int
    S: int
    V: int
    max_len: int
    drafts: int
    tied: bool
    scaled: bool


def from_hf(hf: HF) -> Config:
    """The config of a speculator's ``config.json``. Raises ConfigError for settings that are not supported."""
    D = whole(hf, "emb_dim")
    return Config(
        D=D,
        S=whole(hf, "inner_dim", D, D, ge=0) or D,
        V=whole(hf, "vocab_size"),
        max_len=2**31 - 1,
        drafts=whole(hf, "n_predict", le=_MOST),
        tied=switch(hf, "tie_weights", False),
        scaled=switch(hf, "scale_input", False),
    )


def _part(c: Config, kind: str, i: int) -> int:
    """Which of the stored parts of a kind draft i has."""
    return i if not c.tied else min(i, 1) if kind == "proj" else 0


def head_weights(c: Config) -> dict[str, Weight]:
    weights = {}
    for i in range(c.drafts):
        shapes = {"emb": (c.V, c.S), "proj": (c.S, c.S if i else c.D), "head": (c.V, c.S)}
        for kind, shape in shapes.items():
            part = _part(c, kind, i)
            weights[f"{kind}_{part}"] = Weight(shape, (f"speculator.{kind}.{part}.weight",))
        part = _part(c, "ln", i)
        for leaf in ("weight", "bias"):
            weights[f"ln_{part}_{leaf}"] = Weight((c.S,), (f"speculator.ln.{part}.{leaf}",))
    return weights


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Drafts:
    rows = ctx.inputs.logits_indices
    state_SD, token_S = select_rows(x_TD, rows), torch.index_select(ctx.inputs.token_ids, 0, rows)
    if c.scaled:
        state_SD = _normed(state_SD) / math.sqrt(2)
    # As much of the state as of the token, for however many drafts.
    keep = 0.5 ** (0.5 / c.drafts)
    add = math.sqrt((1 - keep**2) * c.S / 2)
    found = []
    for i in range(c.drafts):
        emb, proj, ln, head = (_part(c, kind, i) for kind in ("emb", "proj", "ln", "head"))
        token_SD = embedding(token_S, getattr(w, f"emb_{emb}"))
        state_SD = linear(state_SD, getattr(w, f"proj_{proj}")) + token_SD * (add / keep)
        scale, shift = (getattr(w, f"ln_{ln}_{leaf}") for leaf in ("weight", "bias"))
        state_SD = gelu(_normed(state_SD) * scale + shift)
        found.append(linear(state_SD, getattr(w, f"head_{head}")))
        token_S = found[-1].argmax(-1).to(torch.int32)
    return Drafts(tuple(found))


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


GRAPH = replace(medusa.GRAPH, head_weights=head_weights, head=head, drafts_at_once=lambda c: c.drafts)
register_model(
    Model(architectures=("MLPSpeculatorPreTrainedModel",), config=from_hf, method="mlp_speculator", graphs=(GRAPH,))
)
