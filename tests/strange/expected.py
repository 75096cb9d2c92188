"""What strange models give, computed for whole sequences by a plain torch loop in float32, without graphllm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm

D, V, WINDOW, PATCH, LEN, TAIL, NARROW = 32, 97, 12, 8, 96, 3, 8
LAYERS = ("recurrent", "latent", "window", "cross", "extern", "tables")


class Seen(NamedTuple):
    """An encoded input: its patches [n, PATCH], and the prompt position that its rows stand in for, -1 for none."""

    patches: Tensor
    position: int


def layers(features: Sequence[str]) -> list[str]:
    return ["full", *(f for f in features if f in LAYERS), "full"]


def weights(features: Sequence[str], seed: int = 5) -> dict[str, Tensor]:
    """Random ones by the names of the checkpoint, before any encoding."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, by: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=g) * by

    found = {"embed": normal(V, D), "out": normal(V, D)}
    found |= {f"layers.{i}.mix": normal(D, D, by=D**-0.5) for i in range(len(layers(features)))}
    if "axes" in features:
        found["axes"] = normal(3 * LEN, D)
    if {"cross", "image"} & set(features):
        found |= {"encoder.patch": normal(D, PATCH, by=PATCH**-0.5), "encoder.0.mix": normal(D, D, by=D**-0.5)}
    return found


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)


def _normed(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, (D,)) @ w.T


def encoded(w: Mapping[str, Tensor], patches: Tensor) -> Tensor:
    """The rows of an encoded input."""
    x = patches @ w["encoder.patch"].T
    h = _normed(x, w["encoder.0.mix"])
    return x + torch.softmax(h @ h.T, -1) @ h


def logits(
    features: Sequence[str], w: Mapping[str, Tensor], tokens: Sequence[int], prompt: int, items: Sequence[Seen] = (),
    tables: Mapping[int, Tensor] | None = None, middle: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Those behind the last token. prompt: how many of the tokens are the prompt. tables: of the request's adapter.
    middle: gets the hidden states behind each layer."""
    n = len(tokens)
    at = torch.arange(n)
    x = w["embed"][list(tokens)].clone()
    memory = torch.zeros(0, D)
    for item in items:
        rows = encoded(w, item.patches)
        if item.position < 0:
            memory = rows
        else:
            x[item.position : item.position + len(rows)] = rows[: max(0, n - item.position)]
    if "axes" in features:
        inside = at < prompt
        axes = at, torch.where(inside, at // 2, prompt // 2 + at - prompt), torch.where(inside, at % 3, 3 + at - prompt)
        x = x + sum(w["axes"][LEN * a + p] for a, p in enumerate(axes))
    past = at[None, :] <= at[:, None]
    for i, kind in enumerate(layers(features)):
        h = _normed(x, w[f"layers.{i}.mix"])
        if tables:
            h = h + x * tables[i]
        if kind == "recurrent":
            padded = torch.cat([torch.zeros(TAIL, D), h])
            means = torch.stack([padded[t : t + TAIL].mean(0) for t in range(n)])
            decay = torch.where(past, 0.75 ** (at[:, None] - at[None, :]).clamp(min=0).double(), 0)
            x = x + h + means + (decay @ h.double()).float()
        elif kind == "latent":
            scale = h.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
            kept = (h / scale).round() * scale
            x = x + pad(_softmax(h @ kept.T, past) @ kept[:, : D - NARROW], (0, NARROW))
        elif kind == "cross":
            x = x + (torch.softmax(h @ memory.T, -1) @ memory if len(memory) else 0)
        elif kind == "tables":
            x = x + h + torch.sin(at.float())[:, None]
        elif kind == "extern":
            mean = (h * 0.5).mean(-1, keepdim=True)
            x = x + (h - mean) * torch.tanh(mean)
        else:
            seen = past & (at[None, :] > at[:, None] - WINDOW) if kind == "window" else past
            x = x + _softmax(h @ h.T, seen) @ h
        if middle is not None:
            middle.append(x)
    return w["out"] @ x[-1]


def drafts(w: Mapping[str, Tensor], tokens: Sequence[int], hidden: Tensor, count: int) -> list[int]:
    """What the draft head guesses behind tokens, of all but the last of which it has a hidden state of the model."""
    ids, rows = list(tokens[1:]), hidden
    for _ in range(count):
        n = len(ids)
        x = torch.cat([w["embed"][ids], rows], -1) @ w["join"].T
        h = _normed(x, w["layers.0.mix"])
        x = x + _softmax(h @ h.T, torch.ones(n, n, dtype=torch.bool).tril()) @ h
        ids.append(int((w["out"] @ x[-1]).argmax()))
        rows = torch.cat([rows, x[-1:]])
    return ids[len(tokens) - 1 :]


def greedy(
    features: Sequence[str], w: Mapping[str, Tensor], prompt: Sequence[int], count: int, items: Sequence[Seen] = (),
    tables: Mapping[int, Tensor] | None = None,
) -> list[int]:  # fmt: skip
    """The likeliest tokens behind a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(features, w, tokens, len(prompt), items, tables).argmax()))
    return tokens[len(prompt) :]


def pooled(w: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """What the pooler gives."""
    x = w["embed"][list(tokens)]
    for i in range(2):
        h = _normed(x, w[f"layers.{i}.mix"])
        x = x + torch.softmax(h @ h.T, -1) @ h
    return x[-1]
