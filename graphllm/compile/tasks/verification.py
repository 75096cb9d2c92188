"""Verification: how a step of a language model verifies drafts, and which sampled tokens it keeps.

There is a class for each way: no drafts, a run of drafts, a tree of drafts. The settings choose one
(`verified_trees.verification_of`). The draft graph asks the same object where the kept tokens of a step lie.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from graphllm.compile.tasks.task import TaskUnit, Values
from graphllm.config import CompileConfig
from graphllm.ir.model import Model
from graphllm.ops.sampling.record_tokens import record_tokens
from graphllm.ops.sampling.sample import sample
from graphllm.ops.speculation.accept_drafts import accept_drafts
from graphllm.ops.speculation.ngram_drafts import ngram_drafts
from graphllm.ops.speculation.rejection_sample import rejection_sample
from graphllm.ops.speculation.resolve_drafts import resolve_drafts
from graphllm.program.specs import InputSpec, StateSpec

_MOST_HISTORY = 1 << 14  # tokens of a sequence
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index")


class Verification:
    """A step without drafts: each row gives one token."""

    def __init__(self, config: CompileConfig) -> None:
        self.config = config

    def check(self, model: Model, c: Any, layers: Sequence[Sequence[StateSpec]]) -> None:
        """Raise ConfigError for a model that cannot verify drafts so. layers: the states of each layer."""

    def inputs(self) -> tuple[InputSpec, ...]:
        """What verification reads of a step, in addition to what sampling reads."""
        return ()

    def states(self) -> tuple[StateSpec, ...]:
        """What verification keeps of each running sequence."""
        return ()

    def resolve(self, declared: Collection[InputSpec]) -> TaskUnit:
        """The unit before the graph's own: what the host did not know of the step's tokens. declared: the inputs of
        the graph."""
        return TaskUnit("resolve_token_ids", lambda v: (_resolve(v),), ("step.token_ids",))

    def sample(self, name: str, logits: str, part: str = "") -> TaskUnit:
        """The unit that samples from logits, and keeps what is accepted."""
        return TaskUnit(name, lambda v: (self._plain(v, logits),), ("tokens",), part)

    def _plain(self, v: Values, logits: str) -> Tensor:
        return record(v, sampled(v, logits), v["step.row_slots"], v["step.row_slots"])

    def after_sampling(self, caches: Sequence[tuple[str, int]]) -> tuple[TaskUnit, ...]:
        """Units that follow the sampling. caches: see `Task.programs`."""
        return ()

    def row_tokens(self, v: Values) -> Tensor:
        """[R]: the token that each row of logits has given."""
        return v["tokens"]

    def kept_rows(self, rows_RX: Tensor, v: Values) -> Tensor:
        """Rows of logits in the order of the kept tokens."""
        return rows_RX

    def along_path(self, v: Values) -> tuple[Tensor, Tensor, Tensor]:
        """Where the tokens of a draft graph's first run come from: of each token its row in the step [T] and the row of
        the token that follows it [T], and the row of each sequence's newest token [S]."""
        count_T = v["step.sequence_ids"].shape[0]
        at_T = torch.arange(count_T, device=v["step.sequence_ids"].device)
        next_T = (at_T + 1).clamp(max=count_T - 1)
        last_S = (v["step.query_start_loc"][1:] - 1 - rejected(v)).clamp(min=0)
        return at_T, next_T, last_S


class ChainVerification(Verification):
    """A run of drafts for each sequence: the first drafts are kept, up to the first wrong one. Drafts come from the
    host, from a draft graph, or are looked up in the text."""

    def __init__(self, config: CompileConfig) -> None:
        super().__init__(config)
        self.most = config.longest_query  # tokens of a sequence that a step verifies

    def states(self) -> tuple[StateSpec, ...]:
        """drafts: proposed tokens, -1 for none.
        rejected: how many drafts the last step rejected.
        version: the version of recurrent states that is valid.
        history: the tokens in which `ngram_drafts` looks the last tokens up.
        """
        return (
            StateSpec("drafts", "slot", (self.most - 1,), "int32", "none"),
            StateSpec("rejected", "slot", (), "int32", "none"),
            StateSpec("version", "slot", (), "int32", "none"),
            *self.further_states(),
        )

    def further_states(self) -> tuple[StateSpec, ...]:
        """States of this way to verify."""
        if not self.config.prompt_lookup_max:
            return ()
        length = max(min(self.config.max_model_len, _MOST_HISTORY), self.most + self.config.prompt_lookup_max)
        return (StateSpec("history", "slot", (length,), "int32", "none"),)

    def resolve(self, declared: Collection[InputSpec]) -> TaskUnit:
        made = ("token_ids", "drafts", "positions", "context_lens", "seq_lens", "state_versions", "sample_index")
        counting = tuple(s.name for s in declared if s.counts)
        nodes = self.node_inputs
        outputs = tuple(n if n == "drafts" else f"step.{n}" for n in (*made, *counting, *nodes))
        return TaskUnit("resolve_drafts", lambda v: self._resolve_drafts(v, counting), outputs)

    node_inputs: tuple[str, ...] = ()  # inputs of tree nodes that the device completes

    def moved(self, v: Values, resolved: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Token ids, drafts, positions, contexts and lengths where the tree's nodes stand; and `node_inputs`."""
        return resolved, ()

    def _resolve_drafts(self, v: Values, counting: Sequence[str]) -> tuple[Tensor, ...]:
        inputs = (
            "token_ids", "positions", "context_lens", "seq_lens", "sequence_ids", "query_start_loc", "slots", "pending",
        )  # fmt: skip
        states = ("last_token", "drafts", "rejected")
        resolved, nodes = self.moved(
            v, resolve_drafts(*(v[f"step.{n}"] for n in inputs), *(v[f"state.{n}"] for n in states))
        )
        versions_S = torch.index_select(v["state.version"], 0, v["step.slots"])
        # A row's place in the output, which decides its random numbers, moves as the position of its token has.
        moved_T = resolved[2] - v["step.positions"]
        index_R = v["step.sample_index"] + torch.index_select(moved_T, 0, v["step.logits_indices"])
        counts = ((v[f"step.{n}"] + moved_T).clamp(min=0) for n in counting)  # of padding, too, no less than zero
        return (*resolved, versions_S, index_R, *counts, *nodes)

    def sample(self, name: str, logits: str, part: str = "") -> TaskUnit:
        """It keeps the first "kept" tokens of each sequence. It also tells how many drafts were "drafted", or, where
        drafts are looked up in the text, on what "runs" of last tokens the next drafts rest."""
        third = "runs" if self.config.prompt_lookup_max else "drafted"
        return TaskUnit(name, lambda v: self._verify(v, logits), ("tokens", "kept", third), part)

    def _verify(self, v: Values, logits: str) -> tuple[Tensor, ...]:
        config = self.config
        tokens_R = _sampled_by_drafts(v, logits, config)
        rows = (v["step.logits_indices"], v["step.row_slots"], v["drafts"])
        where = (v[f"step.{n}"] for n in ("sequence_ids", "query_start_loc", "row_start_loc", "slots"))
        kept = accept_drafts(tokens_R, *rows, *where, v["state.rejected"], v["state.version"], self.most)
        newest_R, kept_R, kept_S, drafted_S = kept
        recorded_R = record(v, tokens_R, newest_R, kept_R)
        if not config.prompt_lookup_max:
            return recorded_R, kept_S, drafted_S
        next_R = torch.index_select(v["step.positions"], 0, v["step.logits_indices"]) + 1
        lengths = (config.prompt_lookup_min, config.prompt_lookup_max)
        slots = (v["step.row_slots"], newest_R)
        runs_R = ngram_drafts(tokens_R, next_R, *slots, v["state.history"], v["state.drafts"], *lengths)
        return recorded_R, kept_S, runs_R


def rejected(v: Values) -> Tensor:
    """[S]: tokens of the step that each sequence has not kept."""
    return torch.index_select(v["state.rejected"], 0, v["step.slots"])


def sampled(v: Values, logits: str) -> Tensor:
    """[R]: a token of each row."""
    return sample(v[logits], *(v[f"step.{n}"] for n in _SAMPLING))


def record(v: Values, tokens_R: Tensor, newest_R: Tensor, kept_R: Tensor) -> Tensor:
    """Note the kept tokens in the states; the tokens."""
    states = (v["state.last_token"], v["state.counts"])
    return record_tokens(tokens_R, newest_R, kept_R, v["step.counted"], *states)


def _resolve(v: Values) -> Tensor:
    """A negative id -(slot + 1) stands for the token last sampled for that slot, which the host does not know yet.

    This token is -1 where none could be chosen. The host will end the request; until then its next step must not fail.
    """
    ids_T = v["step.token_ids"]
    last_T = torch.index_select(v["state.last_token"], 0, (-1 - ids_T).clamp(min=0)).clamp(min=0)
    return torch.where(ids_T < 0, last_T, ids_T)


def _sampled_by_drafts(v: Values, logits: str, config: CompileConfig) -> Tensor:
    """A token for each row, by what is known of the draft that follows it. Where nothing is, drawing and comparing is
    the best that can be done."""
    method = config.rejection_sample_method
    if method == "standard" and config.draft_sample_method == "greedy":
        return sampled(v, logits)
    indices_R, drafts_T = v["step.logits_indices"].long(), v["drafts"]
    sequence_R = torch.index_select(v["step.sequence_ids"], 0, indices_R)
    row_R = torch.arange(indices_R.shape[0], device=indices_R.device)
    followed_R = torch.index_select(v["step.row_start_loc"], 0, sequence_R + 1) > row_R + 1
    next_R = torch.index_select(drafts_T, 0, (indices_R + 1).clamp(max=drafts_T.shape[0] - 1))
    return rejection_sample(
        v[logits],
        *(v[f"step.{n}"] for n in _SAMPLING),
        torch.where(followed_R, next_R, -1),
        v["step.row_slots"],
        v["step.draft_place"],
        v.get("state.draft_probs"),
        config.posterior_threshold if method == "typical" else 0.0,
        config.posterior_alpha if method == "typical" else 0.0,
        config.synthetic_acceptance_rate if method == "synthetic" else 0.0,
    )
