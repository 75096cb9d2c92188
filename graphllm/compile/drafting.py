"""Draft graphs: how a family that guesses another one's next tokens joins it, and the units around its own.

The draft graph runs behind every step of the main graph, on the device: once over the step's tokens (the program
"first"), then once for each further draft over one token a sequence ("next"). What it reads of the main graph the step
leaves in states of axis "token"; what one run hands to the next lies in slot states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphllm.compile.sampling import Stage, Values
from graphllm.config import CompileConfig, ConfigError
from graphllm.ir.model import Graph, Model
from graphllm.ir.specs import InputSpec, StateSpec
from graphllm.ir.weight import Weight
from graphllm.ops.record_drafts import record_drafts
from graphllm.ops.store_rows import store_rows
from graphllm.weights.checkpoint import DRAFT, draft_name
from graphllm.weights.expr import Expr, renamed


def joined(model: Model, drafter: Model, own: Any, vocab: int) -> Model:
    """The family with another one's draft graph, which has a Config of its own. vocab: of the model. Raises ConfigError
    for a family that drafts nothing for it."""
    graph, *others = drafter.graphs
    if others or graph.task != "draft":
        raise ConfigError(f"the draft model's architecture, {', '.join(drafter.architectures)}, is none that drafts")
    if vocab != own.V:
        raise ConfigError(f"the draft model has a vocabulary of {own.V} tokens, the model one of {vocab}")

    def bound(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda c, *rest: function(own, *rest)

    def weights(function: Callable[..., dict[str, Weight]]) -> Callable[..., dict[str, Weight]]:
        return lambda c, *rest: {n: _of_second(w) for n, w in function(own, *rest).items()}

    functions = ("layer_types", "embed", "layer", "head", "states", "inputs", "buckets", "hidden")
    changed: dict[str, Any] = {name: bound(getattr(graph, name)) for name in functions}
    changed |= {name: weights(getattr(graph, name)) for name in ("embed_weights", "layer_weights", "head_weights")}
    drafts = dataclasses.replace(graph, name=DRAFT, **changed)
    return dataclasses.replace(model, graphs=(*model.graphs, drafts), shardable=())  # its Config is never divided


def _of_second(w: Weight) -> Weight:
    """A weight that is read from the second checkpoint."""
    sources = tuple(draft_name(s) if isinstance(s, str) else tuple(map(draft_name, s)) for s in w.sources)
    expr = renamed(w.expr, draft_name) if isinstance(w.expr, Expr) else w.expr
    return dataclasses.replace(w, sources=sources, expr=expr)


def states(graph: Graph, c: Any) -> tuple[StateSpec, ...]:
    """Of each token of the step: its id, its position and the hidden state that the draft graph reads. Of each
    sequence: how many drafts it has, and what drafts the next: the last draft, its position, the hidden state it came
    from."""
    size = graph.hidden(c).size
    return (
        StateSpec("step_ids", "token", (), "int32", "none"),
        StateSpec("step_positions", "token", (), "int32", "none"),
        StateSpec("step_hidden", "token", (size,), "model", "none"),
        StateSpec("draft_count", "slot", (), "int32", "none"),
        StateSpec("draft_token", "slot", (), "int32", "none"),
        StateSpec("draft_position", "slot", (), "int32", "none"),
        StateSpec("draft_hidden", "slot", (size,), "model", "none"),
    )


INPUTS = (InputSpec("sequence_ids", ("T",)), InputSpec("next_tokens", ("S",), provider="next_tokens", neutral=-1))

# Of the main graph: behind what resolves its token ids, and behind the layer that the draft graph reads.
KEEP_IDS = Stage(
    "keep_ids",
    lambda v: _keep((v["step.token_ids"], v["state.step_ids"]), (v["step.positions"], v["state.step_positions"])),
    (),
)
KEEP_HIDDEN = Stage("keep_hidden", lambda v: _keep((v["x"], v["state.step_hidden"])), ())


def _keep(*pairs: tuple[Tensor, Tensor]) -> tuple[()]:
    for rows, state in pairs:
        store_rows(rows, state)
    return ()


_RESOLVED = (
    "step.token_ids", "step.positions", "step.context_lens", "step.seq_lens", "step.logits_indices", "step.hidden",
    "places",
)  # fmt: skip


def programs(config: CompileConfig) -> Mapping[str, tuple[Stage, Stage]]:
    """What comes before the graph's own units and behind its head, by program."""
    choose = Stage("choose", lambda v: _choose(v, config.max_model_len - 1), ())
    return {"first": (Stage("first", _first, _RESOLVED), choose), "next": (Stage("next", _next, _RESOLVED), choose)}


def _first(v: Values) -> tuple[Tensor, ...]:
    """Of each token the one behind it, with the token's hidden state: the next one of the step, or behind the last one
    that is kept what was sampled, or what the host knows of a prompt that goes on."""
    ids_T = v["step.token_ids"]
    at_T = torch.arange(ids_T.shape[0], device=ids_T.device)
    rejected_S = torch.index_select(v["state.rejected"], 0, v["step.slots"])
    row_S = (v["step.query_start_loc"][1:] - 1 - rejected_S).clamp(min=0)
    own = [torch.index_select(v[f"state.step_{n}"], 0, at_T) for n in ("ids", "positions", "hidden")]
    behind_T = torch.index_select(v["state.step_ids"], 0, (at_T + 1).clamp(max=ids_T.shape[0] - 1))
    sequence_T = v["step.sequence_ids"]
    sampled_S = torch.index_select(v["state.last_token"], 0, v["step.slots"])
    next_S = torch.where(v["step.next_tokens"] >= 0, v["step.next_tokens"], sampled_S)
    last_T, row_T = (torch.index_select(t, 0, sequence_T) for t in (next_S, row_S))
    next_T = torch.where(row_T == at_T, last_T, behind_T).clamp(min=0)
    # Sequence lengths are those of the whole step: attention finds the rows' positions by them.
    end_S = torch.index_select(own[1], 0, (v["step.query_start_loc"][1:] - 1).clamp(min=0)) + 1
    return (next_T, own[1], own[1] + 1, end_S, row_S.to(torch.int32), own[2], torch.zeros_like(row_S))


def _next(v: Values) -> tuple[Tensor, ...]:
    """The last draft of each sequence, with the hidden state that it came from."""
    slot_T = torch.index_select(v["step.slots"], 0, v["step.sequence_ids"])
    token_T, position_T, hidden_T = (
        torch.index_select(v[f"state.draft_{n}"], 0, slot_T) for n in ("token", "position", "hidden")
    )
    end_S = torch.index_select(v["state.draft_position"], 0, v["step.slots"]) + 1
    row_S = (v["step.query_start_loc"][1:] - 1).clamp(min=0)
    places_S = torch.index_select(v["state.draft_count"], 0, v["step.slots"])
    return token_T, position_T, position_T + 1, end_S, row_S, hidden_T, places_S


def _choose(v: Values, last_position: int) -> tuple[()]:
    """The likeliest token of each sequence becomes its draft."""
    row_S = v["step.logits_indices"]
    token_S = v["logits"].argmax(-1).to(torch.int32)
    position_S = torch.index_select(v["step.positions"], 0, row_S)
    hidden_SD = torch.index_select(v["x"], 0, row_S)
    names = ("drafts", "draft_count", "draft_token", "draft_position", "draft_hidden")
    kept = (v[f"state.{n}"] for n in names)
    record_drafts(token_S, position_S, hidden_SD, v["places"], v["step.slots"], *kept, last_position)
    return ()
