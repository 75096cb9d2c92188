"""Draft graphs: how a family that guesses another one's next tokens joins it, and the units around its own.

The draft graph runs after every step of the main graph, on the device: once over the step's tokens (the program
"first"), then once for each further draft over one token a sequence ("next"). What it reads of the main graph the step
leaves in states of axis "token"; what one run hands to the next lies in slot states.

There are two kinds. One that reads hidden states takes at each position the hidden state there and the *next* token, so
its last row of a sequence is the main graph's. One that is a model of its own takes the tokens themselves, so
each sequence has a row more: the token that was just sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.compile.tasks import blocks, dynamic_trees, trees
from graphllm.compile.tasks.draft_rows import behind_last, hidden_states, rejected, step_rows
from graphllm.compile.tasks.sampling import ANCESTORS, Stage, Values
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.model import Drafts, Graph, Hidden, Model
from graphllm.ir.weight import Weight
from graphllm.ops.rows.store_rows import store_rows
from graphllm.ops.rows.store_slots import store_slots
from graphllm.ops.sampling.sample import sample
from graphllm.ops.speculation.record_draft_probs import record_draft_probs
from graphllm.ops.speculation.record_drafts import record_drafts
from graphllm.ops.speculation.rejection_sample import draft_seed
from graphllm.program.specs import InputSpec, StateSpec
from graphllm.weights.checkpoint.checkpoint import DRAFT, MAIN, draft_name
from graphllm.weights.plan.expr import Expr, renamed

_WEIGHTS = ("embed_weights", "layer_weights", "head_weights", "project_weights")
_FUNCTIONS = (
    "layer_types", "embed", "layer", "head", "states", "inputs", "buckets", "hidden", "project", "drafts_at_once",
    "context", "mask_token",
)  # fmt: skip


def joined(model: Model, c: Any, drafter: Model, own: Any) -> Model:
    """The family with another one's graph as its draft graph. c, own: the Config of each. Raises ConfigError for two
    that do not fit."""
    graph, *others = drafter.graphs
    kept = [s.name for t in set(graph.layer_types(own)) for s in graph.states(own, t) if s.axis == "slot"]
    if others or graph.task not in ("draft", "generate") or graph.inputs(own) or drafter.states(own) or kept:
        raise ConfigError(f"the draft model's architecture, {', '.join(drafter.architectures)}, is none that drafts")
    if own.V != c.V:
        raise ConfigError(
            f"the draft model has a vocabulary of {own.V} tokens, the model one of {c.V}; use one that was made for it"
        )

    def bound(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return function and (lambda c, *rest: function(own, *rest))

    main = _MainWeights(model.graphs[0], c)

    def weights(function: Callable[..., dict[str, Weight]]) -> Callable[..., dict[str, Weight]]:
        return lambda c, *rest: {n: main.of_second(w) for n, w in function(own, *rest).items()}

    changed: dict[str, Any] = {name: bound(getattr(graph, name)) for name in _FUNCTIONS}
    changed |= {name: weights(getattr(graph, name)) for name in _WEIGHTS}
    drafts = dataclasses.replace(graph, name=DRAFT, task="draft", **changed)
    if (hidden := reads(drafts, model.graphs[0], c)) is not None and hidden.normed:
        drafts = _behind_norm(drafts, model, c, hidden)
    return dataclasses.replace(model, graphs=(*model.graphs, drafts))


def reads(graph: Graph, main: Graph, c: Any) -> Hidden | None:
    """The hidden states that a draft graph reads of the main one, layers counted from 0. Raises ConfigError for layers
    that there are not."""
    count = len(main.layer_types(c))
    found = graph.hidden(c, count)
    if found is None:
        return None
    if wrong := [i for i in found.layers if not -count <= i < count]:
        raise ConfigError(f"the draft model reads the hidden state of layer {wrong[0]}, the model has {count} layers")
    return found._replace(layers=tuple(i % count for i in found.layers))


def check_width(hidden: Hidden, width: Any) -> None:
    """Raises ConfigError for a draft graph that reads hidden states of another width than the model's."""
    if hidden.size != width:
        raise ConfigError(
            f"the draft model reads hidden states of {hidden.size} numbers, the model's have {width}; use one that was "
            "made for it"
        )


class _MainWeights:
    """What a draft model may share with the model."""

    def __init__(self, graph: Graph, c: Any) -> None:
        self._found = {f"embed.{n}": w for n, w in graph.embed_weights(c).items()}
        self._found |= {f"head.{n}": w for n, w in graph.head_weights(c).items()}

    def of_second(self, w: Weight) -> Weight:
        """A weight of the draft model, which is read from the second checkpoint or tied to one of the first."""
        if w.tie is not None and w.tie.startswith(MAIN):
            root = self._root(w)
            return dataclasses.replace(w, tie=root, shard=self._found[root].shard)
        if w.tie is not None:
            return dataclasses.replace(w, tie=f"{DRAFT}.{w.tie}")
        sources = tuple(draft_name(s) if isinstance(s, str) else tuple(map(draft_name, s)) for s in w.sources)
        expr = renamed(w.expr, draft_name) if isinstance(w.expr, Expr) else w.expr
        return dataclasses.replace(w, sources=sources, expr=expr)

    def _root(self, w: Weight) -> str:
        to = w.tie.removeprefix(MAIN)  # type: ignore[union-attr]
        while (found := self._found.get(to)) is not None and found.tie is not None:
            to = found.tie
        if found is None:
            raise ConfigError(f"the draft model shares the model's {to}, and this architecture has none of that name")
        if found.shape != w.shape:
            raise ConfigError(
                f"the draft model shares the model's {to} as {list(w.shape)}, it is {list(found.shape)}; use a draft "
                "model that was made for it"
            )
        return to


def _behind_norm(graph: Graph, model: Model, c: Any, hidden: Hidden) -> Graph:
    """The draft graph, reading what the main graph's last norm makes of its hidden states."""
    main = model.graphs[0]
    norm, project, before = main.norm, graph.project, graph.project_weights
    if norm is None:
        raise ConfigError(
            f"{', '.join(model.architectures)} does not say what its last norm is, which this kind of draft model "
            "reads; use method eagle3, draft_model or ngram"
        )
    own = {f"main_{n}": Weight(w.shape, tie=f"head.{n}") for n, w in main.head_weights(c).items() if len(w.shape) == 1}

    def behind(own_c: Any, w: Any, hidden_TD: Tensor) -> Tensor:
        parts = hidden_TD.unflatten(-1, (-1, hidden.size)).unbind(1)
        mains = SimpleNamespace(**{n.removeprefix("main_"): getattr(w, n) for n in own})
        normed = [norm(c, mains, part) for part in parts]
        joint = normed[0] if len(normed) == 1 else torch.cat(normed, -1)
        return joint if project is None else project(own_c, w, joint)

    return dataclasses.replace(graph, project_weights=lambda c: own | before(c), project=behind)


def one_row_more(graph: Graph, c: Any) -> bool:
    """Whether the draft graph takes the tokens themselves; see above."""
    return graph.hidden(c, 1) is None


def lookahead(graph: Graph, c: Any, config: CompileConfig) -> int:
    """Positions after the tokens of a step for which the draft graph keeps something."""
    if not any(graph.states(c, t) for t in graph.layer_types(c)):
        return 0
    if graph.context is not None:
        return blocks.num_drafts(config) + 1
    if by_levels(graph, c, config):
        return config.tree.rows if config.tree is not None else 0
    return config.num_speculative_tokens - (0 if one_row_more(graph, c) else 1)


def buckets(graph: Graph, c: Any, config: CompileConfig) -> tuple[Bucket, ...]:
    """The sizes that a draft graph is compiled for."""
    plain = [b for b in config.buckets if b.kind == "decode" and b.query_len == 1]
    count = 0 if graph.context is None else blocks.num_drafts(config) + 1
    if by_levels(graph, c, config) and config.tree is not None:
        count = config.tree.rows
    if count:
        return tuple(dict.fromkeys([*config.buckets, *(dataclasses.replace(b, query_len=count) for b in plain)]))
    if not one_row_more(graph, c):
        return config.buckets
    more = [dataclasses.replace(b, query_len=b.query_len + 1) for b in config.buckets if b.kind == "decode"]
    mixed = [dataclasses.replace(b, hi=b.hi + config.max_num_seqs) for b in config.buckets if b.kind == "mixed"]
    return (*plain, *more, *mixed)


def by_levels(graph: Graph, c: Any, config: CompileConfig) -> bool:
    """Whether the draft graph fills a tree of drafts level by level; see `trees`."""
    return config.tree is not None and not one_row_more(graph, c) and not graph.drafts_at_once(c)


def draws(config: CompileConfig) -> bool:
    """Whether drafts are drawn by the requests' temperatures, and not the likeliest tokens."""
    return config.draft_sample_method == "probabilistic"


def states(hidden: Hidden | None, config: CompileConfig, vocab: int) -> tuple[StateSpec, ...]:
    """Of each token of the step: its id, its position and the hidden states that the draft graph reads. Of each
    sequence: how many drafts it has, and what drafts the next: the last draft, its position, the hidden state it came
    from. Where drafts are drawn, draft_probs: of each place the distribution that its draft came from."""
    found = [
        StateSpec("step_ids", "token", (), "int32", "none"),
        StateSpec("step_positions", "token", (), "int32", "none"),
        StateSpec("draft_count", "slot", (), "int32", "none"),
        StateSpec("draft_token", "slot", (), "int32", "none"),
        StateSpec("draft_position", "slot", (), "int32", "none"),
    ]
    if hidden is not None:
        found += [StateSpec(name, "token", (hidden.size,), "model", "none") for name in hidden_states(hidden)]
        if hidden.width:
            found.append(StateSpec("draft_hidden", "slot", (hidden.width,), "model", "none"))
            found += trees.hidden_of_nodes(config.tree, hidden.width) if config.tree is not None else ()
    if isinstance(config.tree, DynamicTree):
        found += dynamic_trees.draft_states(config.tree)
    if draws(config):
        found.append(StateSpec("draft_probs", "slot", (config.num_speculative_tokens, vocab), "float32", "none"))
    return tuple(found)


_DRAWING = (
    InputSpec("draft_temperature", ("S",), "float32", provider="temperature"),
    InputSpec("draft_seed", ("S",), "int64", provider="seed"),
)


def inputs(config: CompileConfig) -> tuple[InputSpec, ...]:
    """The inputs that a draft graph reads on top of every graph's."""
    known = InputSpec("next_tokens", ("S",), provider="next_tokens", neutral=-1)
    tree = () if config.tree is None else (ANCESTORS,)
    return (InputSpec("sequence_ids", ("T",)), known, *(_DRAWING if draws(config) else ()), *tree)


# Of the main graph, after its token ids are resolved.
KEEP_IDS = Stage(
    "keep_ids",
    lambda v: _keep((v["step.token_ids"], v["state.step_ids"]), (v["step.positions"], v["state.step_positions"])),
    (),
)


def keep_hidden(hidden: Hidden) -> list[tuple[int, Stage]]:
    """Units of the main graph, each with the layer that it follows."""

    def stage(state: str) -> Stage:
        return Stage(f"keep_{state}", lambda v: _keep((v["x"], v[f"state.{state}"])), ())

    return [(layer, stage(state)) for layer, state in zip(hidden.layers, hidden_states(hidden), strict=True)]


def _keep(*pairs: tuple[Tensor, Tensor]) -> tuple[()]:
    for rows, state in pairs:
        store_rows(rows, state)
    return ()


_RESOLVED = (
    "step.token_ids", "step.positions", "step.context_lens", "step.seq_lens", "step.logits_indices", "step.places",
)  # fmt: skip


def programs(
    graph: Graph, c: Any, config: CompileConfig, hidden: Hidden | None
) -> Mapping[str, tuple[tuple[Stage, ...], tuple[Stage, ...]]]:
    """The stages before the graph's own units and after its head, by program. Raises ConfigError for more drafts than
    it makes."""
    tree, at_once, last = config.tree, graph.drafts_at_once(c), config.max_model_len - 1
    wanted = config.num_speculative_tokens if tree is None else tree.levels
    if 0 < at_once < wanted:
        told = "num_speculative_tokens is" if tree is None else "speculative_token_tree has paths of"
        does = f"has {at_once} heads" if graph.context is None else f"guesses {at_once} tokens at once"
        raise ConfigError(f"{told} {wanted}: the draft model {does}; give at most that")
    levels = tree if by_levels(graph, c, config) else None
    choose = Stage("choose", lambda v: _choose(v, last), ())
    dynamic = levels if isinstance(levels, DynamicTree) else None
    if dynamic is not None:
        choose = Stage("choose", lambda v: dynamic_trees.choose_first(v, dynamic, last), ())
    elif isinstance(levels, TokenTree):
        choose = Stage("choose", lambda v: trees.choose_first(v, levels, last), ())
    if hidden is None:
        first = [Stage("first", lambda v: _first_of_own(v, last), _RESOLVED)]
    else:
        names = hidden_states(hidden)
        made = (*_RESOLVED, "step.hidden")
        first = [Stage("first", lambda v: _first(v, names, tree, levels is not None), made)]
        if graph.context is not None:
            first = [blocks.context_rows(names, tree)]
        if graph.project is not None:
            project = graph.project
            weights = tuple(graph.project_weights(c).items())
            first.append(
                Stage("project", lambda v: (project(c, _own(v), v["step.hidden"]),), ("step.hidden",), weights=weights)
            )
    if graph.context is not None:
        before, behind = blocks.block(config, graph.mask_token(c))
        return {"first": (tuple(first), ()), "next": ((before,), (behind,))}
    if at_once or (levels is not None and not levels.rows):
        return {"first": (tuple(first), (choose,))}
    if levels is not None:
        before, behind = (
            dynamic_trees.next_level(levels, last)
            if isinstance(levels, DynamicTree)
            else trees.next_level(levels, last)
        )
        return {"first": (tuple(first), (choose,)), "next": ((before,), (behind,))}
    resolved = _RESOLVED if hidden is None else (*_RESOLVED, "step.hidden")
    following = Stage("next", lambda v: _next(v, hidden is not None), resolved)
    return {"first": (tuple(first), (choose,)), "next": ((following,), (choose,))}


def _own(v: Values) -> Any:
    """The parameters of a unit."""
    return SimpleNamespace(**{n[2:]: t for n, t in v.items() if n.startswith("w.")})


def _first(v: Values, hidden: list[str], tree: TokenTree | DynamicTree | None, by_levels: bool) -> tuple[Tensor, ...]:
    """The next token of each token, with the token's hidden states. After the last kept token comes the sampled token,
    or the token that the host knows of a prompt that goes on."""
    rows = step_rows(v, hidden, tree)
    behind_T = torch.index_select(v["state.step_ids"], 0, rows.behind)
    last_T, row_T = (torch.index_select(t, 0, v["step.sequence_ids"]) for t in (behind_last(v), rows.last))
    next_T = torch.where(row_T == torch.arange(row_T.shape[0], device=row_T.device), last_T, behind_T).clamp(min=0)
    indices = (trees.rows_of(rows.last, v) if by_levels else rows.last).to(torch.int32)
    places_S = torch.zeros_like(rows.last)
    return next_T, rows.positions, rows.positions + 1, rows.ends, indices, places_S, rows.hidden


def _first_of_own(v: Values, last_position: int) -> tuple[Tensor, ...]:
    """The tokens of the step, and of each sequence the token after the kept ones. Before the rows of sequence s there
    are s more than in the step."""
    sequence_T, start_loc = v["step.sequence_ids"], v["step.query_start_loc"]
    at_T = torch.arange(sequence_T.shape[0], device=sequence_T.device)
    before_S = torch.arange(start_loc.shape[0] - 1, device=sequence_T.device)
    count_S = start_loc[1:] - start_loc[:-1] - 1
    kept_S = (count_S - rejected(v)).clamp(min=0)
    most = v["state.step_ids"].shape[0] - 1  # for padding
    start_S = torch.index_select(v["state.step_positions"], 0, (start_loc[:-1] - before_S).clamp(min=0, max=most))
    of_S = (start_loc[:-1], start_S, kept_S, behind_last(v))
    first_T, start_T, kept_T, last_T = (torch.index_select(t, 0, sequence_T) for t in of_S)
    place_T = (at_T - first_T).to(torch.int32)
    ids_T = torch.index_select(v["state.step_ids"], 0, (at_T - sequence_T).clamp(min=0, max=most))
    ids_T = torch.where(place_T < kept_T, ids_T, last_T).clamp(min=0)
    position_T = (start_T + place_T).clamp(min=0, max=last_position)
    row_S = (start_loc[:-1] + kept_S).clamp(max=sequence_T.shape[0] - 1).to(torch.int32)
    end_S = start_S + count_S + 1
    return ids_T, position_T, position_T + 1, end_S, row_S, torch.zeros_like(row_S)


def _next(v: Values, hidden: bool) -> tuple[Tensor, ...]:
    """The last draft of each sequence, with the hidden state that it came from."""
    slot_T = torch.index_select(v["step.slots"], 0, v["step.sequence_ids"])
    token_T, position_T = (torch.index_select(v[f"state.draft_{n}"], 0, slot_T) for n in ("token", "position"))
    end_S = torch.index_select(v["state.draft_position"], 0, v["step.slots"]) + 1
    row_S = (v["step.query_start_loc"][1:] - 1).clamp(min=0)
    places_S = torch.index_select(v["state.draft_count"], 0, v["step.slots"])
    hidden_T = (torch.index_select(v["state.draft_hidden"], 0, slot_T),) if hidden else ()
    return token_T, position_T, position_T + 1, end_S, row_S, places_S, *hidden_T


def chosen(made: Any, v: Values, config: CompileConfig, graph: Graph, c: Any) -> Tensor:
    """[S, n] int32: the drafts that follow from what a draft graph's head makes, as many as are wanted at most: the
    likeliest tokens, or draws. Where a tree is filled by levels, the likeliest ones in their order."""
    made = made if isinstance(made, Drafts) else Drafts((made,))
    if graph.context is not None and config.tree is None and not draws(config):
        return _named(blocks.likeliest(made, config), made.ids)
    position_S = torch.index_select(v["step.positions"], 0, v["step.logits_indices"])
    if graph.context is not None:
        made, position_S = blocks.of_each_draft(made, config), blocks.position_behind(v)
    if isinstance(config.tree, DynamicTree):
        return dynamic_trees.likeliest(made, config.tree)
    if config.tree is not None and by_levels(graph, c, config):
        return _named(trees.likeliest(made.logits[0], config.tree), made.ids)
    if config.tree is not None and graph.drafts_at_once(c):
        return _named(trees.fill(made, config.tree), made.ids)
    wanted = made.logits[: config.num_speculative_tokens]
    if draws(config):
        tokens = [_drawn(logits_SV, made.ids, v, position_S, place) for place, logits_SV in enumerate(wanted)]
    else:
        tokens = [logits_SV.argmax(-1) for logits_SV in wanted]
    return _named(torch.stack(tokens, -1), made.ids)


def _named(tokens_SK: Tensor, ids: Tensor | None) -> Tensor:
    """Tokens of the model, where the draft graph has a vocabulary of its own."""
    if ids is not None:
        tokens_SK = torch.index_select(ids, 0, tokens_SK.flatten()).view(tokens_SK.shape)
    return tokens_SK.to(torch.int32)


def _drawn(logits_SV: Tensor, ids: Tensor | None, v: Values, position_S: Tensor, place: int) -> Tensor:
    """[S]: a draw of each sequence by its temperature only, for a place of this run's drafts; the distribution is kept.
    The random numbers belong to the draft's position: no other draft that may be accepted has them, nor the op that
    accepts or replaces it."""
    temperature_S, slots_S = v["step.draft_temperature"], v["step.slots"]
    record_draft_probs(logits_SV, temperature_S, v["step.places"] + place, slots_S, v["state.draft_probs"], ids)
    unfiltered = torch.zeros_like(slots_S), torch.ones_like(temperature_S), torch.zeros_like(temperature_S)
    drawn_S = sample(logits_SV, temperature_S, *unfiltered, draft_seed(v["step.draft_seed"]), position_S + place)
    return drawn_S.clamp(min=0)


def _choose(v: Values, last_position: int) -> tuple[()]:
    """The tokens of each sequence become its drafts."""
    row_S = v["step.logits_indices"]
    position_S = torch.index_select(v["step.positions"], 0, row_S)
    kept = (v[f"state.{n}"] for n in ("drafts", "draft_count", "draft_token", "draft_position"))
    record_drafts(v["drafted"], position_S, v["step.places"], v["step.slots"], *kept, last_position)
    if "state.draft_hidden" in v:
        store_slots(torch.index_select(v["x"], 0, row_S), v["step.slots"], v["state.draft_hidden"])
    return ()
