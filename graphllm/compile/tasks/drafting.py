"""Ways of drafting: the base, and the ways that fill one run of drafts.

There are two kinds of draft graphs. One reads hidden states: at each position it takes the hidden state there and the
token that *follows*, so its last row of a sequence is the main graph's. The other is a language model of its own: it
takes the tokens themselves, so each sequence has one row more, the token that was just sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.compile.tasks.draft_rows import hidden_states, next_token, step_rows
from graphllm.compile.tasks.task import ProgramUnits, TaskUnit, Values
from graphllm.compile.tasks.verification import Verification, rejected
from graphllm.config import Bucket, CompileConfig
from graphllm.config.token_tree import TokenTree
from graphllm.ir.model import Drafts, Graph, Hidden
from graphllm.ops.rows.store_slots import store_slots
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.token_logprobs import token_logprobs
from graphllm.ops.speculation.record_draft_probs import record_draft_probs
from graphllm.ops.speculation.record_drafts import record_drafts
from graphllm.ops.speculation.rejection_sample import draft_seed
from graphllm.program.program import DraftReach
from graphllm.program.specs import InputSpec, StateSpec

DRAWING = (
    InputSpec("draft_temperature", ("S",), "float32", provider="temperature"),
    InputSpec("draft_seed", ("S",), "int64", provider="seed"),
)
RESOLVED = (
    "step.token_ids", "step.positions", "step.context_lens", "step.seq_lens", "step.logits_indices", "step.places",
)  # fmt: skip


class Drafting:
    """A way of drafting, of one draft graph.

    hidden: what it reads of the main graph; None for a language model of its own.
    verification: how the main graph verifies its drafts.
    last: the last position of a sequence.
    draws: drafts are drawn by the requests' temperatures; otherwise they are the likeliest tokens.
    """

    def __init__(
        self, graph: Graph, c: Any, config: CompileConfig, hidden: Hidden | None, verification: Verification
    ) -> None:
        self.graph, self.c, self.config, self.hidden, self.verification = graph, c, config, hidden, verification
        self.last = config.max_model_len - 1
        self.draws = config.draft_sample_method == "probabilistic"
        self.keeps = any(graph.states(c, layer_type) for layer_type in graph.layer_types(c))

    @property
    def lookahead(self) -> int:
        """Positions after a step's tokens for which the draft graph keeps something."""
        return self.config.num_speculative_tokens - 1 if self.keeps else 0

    @property
    def rows(self) -> int:
        """Rows of each sequence in a further run, where they are not one."""
        return 0

    def reach(self) -> DraftReach:
        """What the host must know."""
        return DraftReach(self.lookahead, next_seen=self.lookahead > 0, at_once=self.graph.drafts_at_once(self.c))

    def buckets(self) -> tuple[Bucket, ...]:
        """The sizes that the draft graph is compiled for."""
        config, rows = self.config, self.rows
        plain = [b for b in config.buckets if b.kind == "decode" and b.query_len == 1] if rows else []
        return tuple(dict.fromkeys([*config.buckets, *(dataclasses.replace(b, query_len=rows) for b in plain)]))

    def states(self) -> tuple[StateSpec, ...]:
        """step_*: of each token of the step, its id, its position and the hidden states that the draft graph reads.
        draft_count: how many drafts a sequence has.
        draft_token, draft_position, draft_hidden: the last draft, its position, the hidden state it came from.
        draft_probs: where drafts are drawn, the distribution of each place's draft.
        """
        hidden = self.hidden
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
        found += self.further_states()
        if self.draws:
            shape = (self.config.num_speculative_tokens, self.c.V)
            found.append(StateSpec("draft_probs", "slot", shape, "float32", "none"))
        return tuple(found)

    def further_states(self) -> tuple[StateSpec, ...]:
        """States of this way."""
        return ()

    def first(self) -> TaskUnit:
        """The unit before the graph's own in the first run: of each token of the step the token that follows it, with
        the token's hidden states. After the last kept token comes the sampled one, or, of a prompt that goes on, the
        one that the host knows."""
        return TaskUnit("first", self._first, (*RESOLVED, "step.hidden"))

    def _first(self, v: Values) -> tuple[Tensor, ...]:
        rows = step_rows(v, self._hidden_states(), self.verification)
        following_T = torch.index_select(v["state.step_ids"], 0, rows.following)
        last_T, row_T = (torch.index_select(t, 0, v["step.sequence_ids"]) for t in (next_token(v), rows.last))
        is_last_T = row_T == torch.arange(row_T.shape[0], device=row_T.device)
        next_T = torch.where(is_last_T, last_T, following_T).clamp(min=0)
        indices = self.logits_rows(rows.last, v).to(torch.int32)
        places_S = torch.zeros_like(rows.last)
        return next_T, rows.positions, rows.positions + 1, rows.ends, indices, places_S, rows.hidden

    def _hidden_states(self) -> list[str]:
        return [] if self.hidden is None else hidden_states(self.hidden)

    def logits_rows(self, last_S: Tensor, v: Values) -> Tensor:
        """The rows that get logits from the first run's head. last_S: of each sequence's last kept token."""
        return last_S

    def before_first(self) -> tuple[TaskUnit, ...]:
        """What comes before the graph's own units in the first run."""
        graph, c = self.graph, self.c
        if self.hidden is None or (project := graph.project) is None:
            return (self.first(),)
        weights = tuple(graph.project_weights(c).items())

        def run(v: Values) -> tuple[Tensor]:
            own = SimpleNamespace(**{n[2:]: t for n, t in v.items() if n.startswith("w.")})
            return (project(c, own, v["step.hidden"]),)

        return (self.first(), TaskUnit("project", run, ("step.hidden",), weights=weights))

    def choose(self) -> TaskUnit:
        """The unit after the head: the tokens of each sequence become its drafts."""
        return TaskUnit("choose", self._choose, ())

    def _choose(self, v: Values) -> tuple[()]:
        row_S = v["step.logits_indices"]
        position_S = torch.index_select(v["step.positions"], 0, row_S)
        record(v, v["drafted"], position_S, v["step.places"], self.last)
        if "state.draft_hidden" in v:
            store_slots(torch.index_select(v["x"], 0, row_S), v["step.slots"], v["state.draft_hidden"])
        return ()

    def programs(self) -> Mapping[str, ProgramUnits]:
        """The units of the first run, and of a further one where there is any."""
        return {"first": ProgramUnits(self.before_first(), (self.choose(),))}

    def chosen(self, made: Drafts, v: Values) -> Tensor:
        """[S, n] int32: the drafts that follow from what the head has made."""
        wanted = made.logits[: self.config.num_speculative_tokens]
        if not self.draws:
            return named(torch.stack([logits_SV.argmax(-1) for logits_SV in wanted], -1), made.ids)
        position_S = self.first_position(v)
        tokens = [_drawn(logits_SV, made.ids, v, position_S, place) for place, logits_SV in enumerate(wanted)]
        return named(torch.stack(tokens, -1), made.ids)

    def first_position(self, v: Values) -> Tensor:
        """[S]: the position before a run's first draft."""
        return torch.index_select(v["step.positions"], 0, v["step.logits_indices"])


class Heads(Drafting):
    """The first run makes all drafts, each by a head of its own (Medusa). The heads may fill a tree."""

    def chosen(self, made: Drafts, v: Values) -> Tensor:
        if (tree := self.config.tree) is None:
            return super().chosen(made, v)
        assert isinstance(tree, TokenTree)  # `TreeVerification.check_drafter`
        return named(filled(made, tree), made.ids)


class Chain(Drafting):
    """Each run makes one draft, and a further one reads the draft and the hidden state that it came from."""

    def following(self) -> TaskUnit:
        """The unit before the graph's own in a further run."""
        outputs = RESOLVED if self.hidden is None else (*RESOLVED, "step.hidden")
        return TaskUnit("next", lambda v: _next(v, self.hidden is not None), outputs)

    def programs(self) -> Mapping[str, ProgramUnits]:
        choose = (self.choose(),)
        return {
            "first": ProgramUnits(self.before_first(), choose),
            "next": ProgramUnits((self.following(),), choose),
        }


class OwnChain(Chain):
    """The draft graph is a language model of its own."""

    @property
    def lookahead(self) -> int:
        return self.config.num_speculative_tokens if self.keeps else 0

    def reach(self) -> DraftReach:
        return DraftReach(self.lookahead, one_row_more=True, at_once=self.graph.drafts_at_once(self.c))

    def buckets(self) -> tuple[Bucket, ...]:
        config = self.config
        plain = [b for b in config.buckets if b.kind == "decode" and b.query_len == 1]
        more = [dataclasses.replace(b, query_len=b.query_len + 1) for b in config.buckets if b.kind == "decode"]
        mixed = [dataclasses.replace(b, hi=b.hi + config.max_num_seqs) for b in config.buckets if b.kind == "mixed"]
        return (*plain, *more, *mixed)

    def first(self) -> TaskUnit:
        return TaskUnit("first", lambda v: _first_of_own(v, self.last), RESOLVED)


def record(v: Values, drafts_SJ: Tensor, position_S: Tensor, places_S: Tensor, last_position: int) -> None:
    """Note drafts in the states. places_S: the place of the first one of each sequence."""
    kept = (v[f"state.{n}"] for n in ("drafts", "draft_count", "draft_token", "draft_position"))
    record_drafts(drafts_SJ, position_S, places_S, v["step.slots"], *kept, last_position)


def _first_of_own(v: Values, last_position: int) -> tuple[Tensor, ...]:
    """The tokens of the step, and for each sequence one more row: the token that follows its kept tokens. So before the
    rows of sequence s there are s rows more than in the step."""
    sequence_T, start_loc = v["step.sequence_ids"], v["step.query_start_loc"]
    at_T = torch.arange(sequence_T.shape[0], device=sequence_T.device)
    before_S = torch.arange(start_loc.shape[0] - 1, device=sequence_T.device)
    count_S = start_loc[1:] - start_loc[:-1] - 1
    kept_S = (count_S - rejected(v)).clamp(min=0)
    most = v["state.step_ids"].shape[0] - 1  # for padding
    start_S = torch.index_select(v["state.step_positions"], 0, (start_loc[:-1] - before_S).clamp(min=0, max=most))
    of_S = (start_loc[:-1], start_S, kept_S, next_token(v))
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


def named(tokens_SK: Tensor, ids: Tensor | None) -> Tensor:
    """Tokens of the model, where the draft graph has a vocabulary of its own."""
    if ids is not None:
        tokens_SK = torch.index_select(ids, 0, tokens_SK.flatten()).view(tokens_SK.shape)
    return tokens_SK.to(torch.int32)


def _drawn(logits_SV: Tensor, ids: Tensor | None, v: Values, position_S: Tensor, place: int) -> Tensor:
    """[S]: a draw of each sequence by its temperature only, for a place of this run's drafts. The distribution is kept.
    The random numbers belong to the position: neither another draft that may be accepted has them, nor what accepts or
    replaces the draft."""
    temperature_S, slots_S = v["step.draft_temperature"], v["step.slots"]
    record_draft_probs(logits_SV, temperature_S, v["step.places"] + place, slots_S, v["state.draft_probs"], ids)
    unfiltered = torch.zeros_like(slots_S), torch.ones_like(temperature_S), torch.zeros_like(temperature_S)
    drawn_S = sample(logits_SV, temperature_S, *unfiltered, draft_seed(v["step.draft_seed"]), position_S + place)
    return drawn_S.clamp(min=0)


def filled(made: Drafts, tree: TokenTree) -> Tensor:
    """[S, n] int32: the drafts of a tree's nodes, without the root: of each the token of the head of its depth that its
    path names."""
    of_level = [
        ranked(logits_SV, max(path[-1] for path in tree.paths if len(path) == level))
        for level, logits_SV in enumerate(made.logits[: tree.levels], 1)
    ]
    return torch.stack([of_level[len(path) - 1][:, path[-1]] for path in tree.paths], -1)


def ranked(logits_SV: Tensor, last: int) -> Tensor:
    """[S, last + 1]: the likeliest tokens in their order."""
    if last == 0:
        return logits_SV.argmax(-1, keepdim=True)
    count = last + 1
    none_S = torch.zeros(logits_SV.shape[0], dtype=torch.int32, device=logits_SV.device)
    scores_SX = token_logprobs(logits_SV, none_S, none_S - 1, none_S, count)
    return scores_SX[:, 2 + count :].long()
