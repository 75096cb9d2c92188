"""What the families share: reading ``config.json`` with errors that name the remedy, splitting merged heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import note, raw, whole
from graphllm.ir import Weight
from graphllm.ir.weight import Shard
from graphllm.weights.checkpoint.checkpoint import MAIN
from graphllm.weights.checkpoint.own_head import HEAD
from graphllm.weights.plan.expr import Concat, Expr, Read, Reshape, Slice, map_parts

HF = Mapping[str, Any]
C = TypeVar("C")
Sources = tuple[str | tuple[str, ...], ...]
MOST_LAYERS = 4096
LARGEST_HEAD = 2**16
_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}


def only(hf: HF, name: str, *accepted: Any) -> Any:
    """The field's value, the first accepted one when it is missing. Raises ConfigError unless it is accepted."""
    value = raw(hf, name, accepted[0])
    if not any(value == a and type(value) is type(a) for a in accepted):
        choice = " or ".join(repr(a) for a in accepted)
        raise ConfigError(f"config.json: {name} is {value!r}, which is not supported; use a checkpoint with {choice}")
    return value


def extended(config: type[C], base: Any, **fields: Any) -> C:
    """A ``config`` with every field of ``base``, an instance of the class that it extends. fields: what it adds, or has
    in place of the base's."""
    return config(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)} | fields)


def also_named(hf: HF, **others: str) -> HF:
    """The fields of a file that may have some of them under a second name, as transformers reads them. others: that
    name of each field."""
    note(hf, *others.values())
    return {name: hf[other] for name, other in others.items() if other in hf} | dict(hf)


def check_plain(hf: HF) -> None:
    """Raises ConfigError for a checkpoint in which tokens see later tokens."""
    only(hf, "is_causal", True)


def heads(hf: HF) -> tuple[int, int]:
    """Query heads, and key and value heads, which there may be fewer of. Raises ConfigError for a group size that is
    not whole."""
    H = whole(hf, "num_attention_heads")
    K = whole(hf, "num_key_value_heads", H, H)
    if H % K:
        raise ConfigError(
            f"config.json: num_key_value_heads is {K}, no divisor of num_attention_heads = {H}; correct one of them"
        )
    return H, K


def head_dim(hf: HF) -> int:
    """``head_dim``, or the width divided by the heads when the file does not say."""
    if raw(hf, "head_dim") is not None:
        return whole(hf, "head_dim", le=LARGEST_HEAD)
    D, H = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    if D % H:
        raise ConfigError(f"config.json: hidden_size {D} is no multiple of num_attention_heads {H}; set head_dim")
    return D // H


def widths(hf: HF, width: str, heads: str, usual: tuple[int, int] = (768, 12)) -> tuple[int, int, int]:
    """D, H and E = D / H. width, heads: the fields' names. usual: D and H of files without them; default: those of
    GPT-2 and BERT. Raises ConfigError when E is no whole number."""
    D, H = whole(hf, width, usual[0]), whole(hf, heads, usual[1])
    if D % H:
        raise ConfigError(f"config.json: {width} is {D}, no multiple of {heads} = {H}; correct one of them")
    return D, H, D // H


def experts_per_token(hf: HF, N: int, default: int | None = None) -> int:
    """How many of N experts a token is sent to. Raises ConfigError for more than there are."""
    A = whole(hf, "num_experts_per_tok", default)
    if A > N:
        raise ConfigError(f"config.json: num_experts_per_tok is {A}; set it to the checkpoint's, from 1 to {N} experts")
    return A


def layer_types_of(
    layer_types: Sequence[str], L: int, known: Mapping[str, str] = _LAYER_TYPES, field: str = "layer_types"
) -> tuple[str, ...]:
    """Layer types of L layers from a field of the file. Raises ConfigError for unknown types, and for more or fewer
    layers. known: a layer type for each of the file's; usually "full" and "sliding"."""
    for name in layer_types:
        if name not in known:
            raise ConfigError(
                f"config.json: {field} has {name!r}, which is not supported; use a checkpoint with "
                + " and ".join(known)
            )
    if len(layer_types) != L:
        raise ConfigError(
            f"config.json: {field} has {len(layer_types)} entries; give one for each of num_hidden_layers = {L}"
        )
    return tuple(known[name] for name in layer_types)


def single_experts(of: str, names: tuple[str, ...], count: int, rows: int, inner: int, shard: Shard) -> Weight:
    """The matrices [rows, inner] of experts that are stored one by one, stacked; several of an expert one after the
    other. of: what their names begin with, before the expert's number."""
    sources = tuple(f"{of}{n}.{name}.weight" for n in range(count) for name in names)
    segments = (rows,) * len(sources)
    return Weight((count, len(names) * rows, inner), sources, segments, shard=shard, expert_axis=0)


def token_table(c: Any, *names: str) -> Weight:
    """The embedding [V, D]; a tied one may be stored as the head."""
    return Weight((c.V, c.D), ((*names, HEAD) if c.tied else names,), shard="vocab")


def head_matrix(c: Any) -> Weight:
    """The language head [V, D], which may be tied to the embedding."""
    return Weight((c.V, c.D), () if c.tied else (HEAD,), tie="embed.tokens" if c.tied else None, shard="vocab")


def main_tokens(c: Any) -> Weight:
    """Of a draft graph: the embedding [V, D] of the model that it drafts for."""
    return Weight((c.V, c.D), tie=f"{MAIN}embed.tokens")


def main_head(c: Any) -> Weight:
    """Of a draft graph: the language head [V, D] of the model that it drafts for."""
    return Weight((c.V, c.D), tie=f"{MAIN}head.lm_head")


def with_bias(
    name: str, shape: tuple[int, ...], sources: Callable[[str], Sources], segments: tuple[int, ...] = (),
    shard: Shard | None = None, transpose: bool = False,
) -> dict[str, Weight]:  # fmt: skip
    """A matrix [out, in] or the scale of a norm, ``name``, and its bias, ``name``_bias. sources: the tensors of either
    by the end of their names, "weight" or "bias". The other arguments are `Weight`'s."""
    return {
        name: Weight(shape, sources("weight"), segments, shard=shard, transpose=transpose),
        f"{name}_bias": Weight(shape[:1], sources("bias"), segments, shard="output" if shard == "output" else None),
    }


def named_too(weights: Mapping[str, Weight], start: str, *others: str) -> dict[str, Weight]:
    """The same weights; each tensor's name may also begin with one of ``others`` in place of ``start``, which come
    first."""

    def alternatives(source: str | tuple[str, ...]) -> tuple[str, ...]:
        (name,) = (source,) if isinstance(source, str) else source
        return (*(other + name.removeprefix(start) for other in others), name)

    def read(expr: Expr) -> Expr:
        if isinstance(expr, Read):
            return dataclasses.replace(expr, sources=tuple(n for s in expr.sources for n in alternatives(s)))
        return map_parts(expr, read)

    return {
        n: dataclasses.replace(
            w, sources=tuple(map(alternatives, w.sources)), expr=read(w.expr) if isinstance(w.expr, Expr) else w.expr
        )
        for n, w in weights.items()
    }


def by_turns(source: str | tuple[str, ...], turns: int, rows: Sequence[int], *width: int) -> Expr:
    """A projection whose parts are stored by turns, as one part after the other: [turns * sum(rows), *width].

    source: name of the tensor, or several, of which the first one present is taken. turns: how often each part comes.
    rows: of each part in a turn. width: of a matrix; a bias has none.
    """
    names = (source,) if isinstance(source, str) else source
    stored = Read(names, (turns * sum(rows), *width))
    by_turn = Reshape(stored, (turns, sum(rows), *width))
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    parts = (Slice(by_turn, 1, end - count, end) for end, count in zip(ends, rows, strict=True))
    return Concat(tuple(Reshape(part, (turns * count, *width)) for part, count in zip(parts, rows, strict=True)))


def split_heads(qkv_TO: Tensor, H: int, K: int, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, E], keys and values [T, K, E]: views of the merged projection's rows."""
    q_THE, k_TKE, v_TKE = qkv_TO.unflatten(1, (H + 2 * K, E)).split((H, K, K), dim=1)
    return q_THE, k_TKE, v_TKE
