"""The units around a graph that generates: what feeds it token ids, and the programs that sample from its logits.

Their inputs and states are declared here, as models declare theirs; the ops say what each one means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphllm.compile.tasks import tree_nodes
from graphllm.config import CompileConfig
from graphllm.config.compilation import ranked_logprobs
from graphllm.config.requests.sampling_params import sampling_columns
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.weight import Weight
from graphllm.ops.sampling.process_logits import process_logits
from graphllm.ops.sampling.record_tokens import record_tokens
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.token_logprobs import token_logprobs
from graphllm.ops.speculation.accept_drafts import accept_drafts
from graphllm.ops.speculation.accept_dynamic_tree import accept_dynamic_tree
from graphllm.ops.speculation.accept_tree import accept_tree
from graphllm.ops.speculation.keep_path import keep_path
from graphllm.ops.speculation.ngram_drafts import ngram_drafts
from graphllm.ops.speculation.rejection_sample import rejection_sample
from graphllm.ops.speculation.resolve_drafts import resolve_drafts
from graphllm.program.specs import InputSpec, OutputSpec, StateSpec

Values = dict[str, Any]

_MOST_HISTORY = 1 << 14  # tokens of a sequence


class Stage(NamedTuple):
    """A unit of a sampling program. outputs: what it makes. part: the part of the program that it begins, "" for
    none. weights: its parameters."""

    name: str
    run: Callable[[Values], tuple[Tensor, ...]]
    outputs: tuple[str, ...]
    part: str = ""
    weights: tuple[tuple[str, Weight], ...] = ()


# Of each row, the nodes on the path to it in the tree of drafts that its sequence verifies; -1 without one.
ANCESTORS = InputSpec("ancestors", ("T",), "int64", neutral=-1)


def inputs(config: CompileConfig, vocab: int) -> tuple[InputSpec, ...]:
    """Of every sampled row, in the order in which they are staged; rows that nobody asked for get neutral values.

    The mask comes last, so that steps without one need not copy it.
    """

    def rows(name: str, dtype: str, neutral: float = 0) -> InputSpec:
        return InputSpec(name, ("R",), dtype, neutral=neutral)

    return (
        *(rows(c.name, c.dtype, c.neutral) for c in sampling_columns()),
        rows("sample_index", "int32"),
        rows("row_slots", "int32", config.max_num_seqs),  # the scrap one
        rows("counted", "int32"),
        rows("mask_row", "int32", -1),
        rows("bias_count", "int32"),
        rows("draft_place", "int32"),
        rows("target", "int32", -1),
        rows("wanted", "int32", -1),
        InputSpec("mask", ("R", -(-vocab // 32)), late=True),
        # Read only where drafts are verified: the sequence of each token, whether the step in flight verifies drafts of
        # a sequence, and where its rows begin.
        InputSpec("sequence_ids", ("T",)),
        InputSpec("pending", ("S",)),
        InputSpec("row_start_loc", ("S + 1",), padding="last"),
        *(() if config.tree is None else (ANCESTORS,)),
    )


def states(config: CompileConfig, vocab: int, versions: int) -> tuple[StateSpec, ...]:
    """What sampling keeps of each running sequence. versions: tokens of a step that may be verified, 1 without drafts.
    drafts: proposed tokens, -1 for none. rejected: how many of the last step's. version: which version of recurrent
    states is valid. history: what `ngram_drafts` looks the last tokens up in. path: the nodes of a tree of drafts that
    the last step kept, see `accept_tree`."""
    verifying = (
        StateSpec("drafts", "slot", (versions - 1,), "int32", "none"),
        StateSpec("rejected", "slot", (), "int32", "none"),
        StateSpec("version", "slot", (), "int32", "none"),
    )
    length = max(min(config.max_model_len, _MOST_HISTORY), versions + config.prompt_lookup_max)
    history = StateSpec("history", "slot", (length,), "int32", "none")
    path = () if config.tree is None else (StateSpec("path", "slot", (config.tree.levels + 2,), "int32", "none"),)
    return (
        *(verifying if versions > 1 else ()),
        *path,
        *(tree_nodes.states(config.tree) if isinstance(config.tree, DynamicTree) else ()),
        *((history,) if config.prompt_lookup_max else ()),
        StateSpec("last_token", "slot", (), "int32", "none"),
        StateSpec("counts", "slot", (vocab,), "int32", "none"),
        StateSpec("bias_token", "slot", (config.max_logit_bias,), "int32", "none"),
        StateSpec("bias_value", "slot", (config.max_logit_bias,), "float32", "none"),
    )


OUTPUTS = (
    OutputSpec("tokens", ("R",), "int32", host=True),
    OutputSpec("kept", ("S",), "int32", host=True),
    OutputSpec("drafted", ("S",), "int32", host=True),
    OutputSpec("runs", ("R",), "int32", host=True),
    OutputSpec("logits", ("R", "V"), "model"),
    OutputSpec("adjusted", ("R", "V"), "float32"),
    OutputSpec("scores", ("R", "2 + 2 * ranked_logprobs"), "float32"),
    OutputSpec("path_rows", ("R",), "int32"),
)


def beginning(versions: int, declared: Iterable[InputSpec], grown: bool = False) -> Stage:
    """What comes before the model's own units. declared: the inputs of the graph. grown: trees of drafts grow."""
    if versions == 1:
        return Stage("resolve_token_ids", lambda v: (_resolve(v),), ("step.token_ids",))
    made = ("token_ids", "drafts", "positions", "context_lens", "seq_lens", "state_versions", "sample_index")
    counting = tuple(s.name for s in declared if s.counts)
    nodes = ("ancestors",) if grown else ()
    outputs = tuple(n if n == "drafts" else f"step.{n}" for n in (*made, *counting, *nodes))
    return Stage("resolve_drafts", lambda v: _resolve_drafts(v, counting, grown), outputs)


def programs(
    config: CompileConfig, versions: int, caches: Iterable[tuple[str, int]] = ()
) -> dict[str, tuple[Stage, ...]]:
    """The units after the head by program.

    "plain" samples from the logits. "full" has the parts "adjust" (logits to "adjusted"), "sample" and "logprobs"
    ("scores") for steps in which a request asks for more. Where drafts are verified, both keep the first "kept" of each
    sequence's sampled tokens, and return how many drafts were "drafted"; of a tree these are the tokens of rows
    "path_rows". Where drafts are looked up in the text, they return the "runs" of last tokens that the next drafts rest
    on.

    caches: the names of the layers' keys and values, each with its cache group.
    """
    tree, caches = config.tree, tuple(caches)

    def sampled(logits: str) -> Stage:
        name = "sample" if logits == "logits" else "sample_adjusted"
        part = "" if logits == "logits" else "sample"
        if versions == 1:
            return Stage(name, lambda v: (_plain(v, logits),), ("tokens",), part)
        if tree is not None:
            outputs = ("tokens", "kept", "drafted", "path_rows", "path", "row_tokens")
            return Stage(name, lambda v: _verify_tree(v, logits, tree), outputs, part)
        told = "runs" if config.prompt_lookup_max else "drafted"
        return Stage(name, lambda v: _verify(v, logits, versions, config), ("tokens", "kept", told), part)

    def logprobs(v: Values) -> tuple[Tensor]:
        most = ranked_logprobs(config.max_logprobs)
        tokens_R = v["tokens"] if tree is None else v["row_tokens"]
        scores_RX = token_logprobs(v["logits"], tokens_R, v["step.target"], v["step.wanted"], most)
        return (scores_RX if tree is None else torch.index_select(scores_RX, 0, v["path_rows"]),)

    kept = () if tree is None else (Stage("keep_path", lambda v: _keep_path(v, caches), ()),)
    return {
        "plain": (sampled("logits"), *kept),
        "full": (
            Stage("process_logits", _process, ("adjusted",), part="adjust"),
            sampled("adjusted"),
            *kept,
            Stage("logprobs", logprobs, ("scores",), part="logprobs"),
        ),
    }


def _resolve(v: Values) -> Tensor:
    """A negative id -(slot + 1) stands for the token last sampled for that slot, which the host does not know yet.

    That token is -1 where none could be chosen. The host will end the request; its next step must not fail before.
    """
    ids_T = v["step.token_ids"]
    last_T = torch.index_select(v["state.last_token"], 0, (-1 - ids_T).clamp(min=0)).clamp(min=0)
    return torch.where(ids_T < 0, last_T, ids_T)


def _resolve_drafts(v: Values, counting: Iterable[str], grown: bool) -> tuple[Tensor, ...]:
    inputs = (
        "token_ids",
        "positions",
        "context_lens",
        "seq_lens",
        "sequence_ids",
        "query_start_loc",
        "slots",
        "pending",
    )
    states = ("last_token", "drafts", "rejected")
    resolved = resolve_drafts(*(v[f"step.{n}"] for n in inputs), *(v[f"state.{n}"] for n in states))
    nodes: tuple[Tensor, ...] = ()
    if grown:
        depth_T, bits_T = tree_nodes.of_rows(v)
        ids_T, drafts_T, position_T, context_T, lengths_S = resolved
        resolved, nodes = (ids_T, drafts_T, position_T + depth_T, context_T + depth_T, lengths_S), (bits_T,)
    versions_S = torch.index_select(v["state.version"], 0, v["step.slots"])
    # A row's place in the output, which decides its random numbers, moves as the position of its token has.
    moved_T = resolved[2] - v["step.positions"]
    index_R = v["step.sample_index"] + torch.index_select(moved_T, 0, v["step.logits_indices"])
    counts = ((v[f"step.{n}"] + moved_T).clamp(min=0) for n in counting)  # of padding, too, no less than zero
    return (*resolved, versions_S, index_R, *counts, *nodes)


def _sample(v: Values, logits: str) -> Tensor:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index")
    return sample(v[logits], *(v[f"step.{n}"] for n in names))


def _plain(v: Values, logits: str) -> Tensor:
    return _record(v, _sample(v, logits), v["step.row_slots"], v["step.row_slots"])


def _sample_drafted(v: Values, logits: str, config: CompileConfig) -> Tensor:
    """A token for each row, by what is known of the draft that follows it. Where nothing is, drawing and comparing is
    the best that can be done."""
    method = config.rejection_sample_method
    if method == "standard" and config.draft_sample_method == "greedy":
        return _sample(v, logits)
    indices_R, drafts_T = v["step.logits_indices"].long(), v["drafts"]
    sequence_R = torch.index_select(v["step.sequence_ids"], 0, indices_R)
    row_R = torch.arange(indices_R.shape[0], device=indices_R.device)
    followed_R = torch.index_select(v["step.row_start_loc"], 0, sequence_R + 1) > row_R + 1
    next_R = torch.index_select(drafts_T, 0, (indices_R + 1).clamp(max=drafts_T.shape[0] - 1))
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index")
    return rejection_sample(
        v[logits],
        *(v[f"step.{n}"] for n in names),
        torch.where(followed_R, next_R, -1),
        v["step.row_slots"],
        v["step.draft_place"],
        v.get("state.draft_probs"),
        config.posterior_threshold if method == "typical" else 0.0,
        config.posterior_alpha if method == "typical" else 0.0,
        config.synthetic_acceptance_rate if method == "synthetic" else 0.0,
    )


def _record(v: Values, tokens_R: Tensor, newest_R: Tensor, kept_R: Tensor) -> Tensor:
    states = (v["state.last_token"], v["state.counts"])
    return record_tokens(tokens_R, newest_R, kept_R, v["step.counted"], *states)


def _verify(v: Values, logits: str, versions: int, config: CompileConfig) -> tuple[Tensor, ...]:
    tokens_R = _sample_drafted(v, logits, config)
    rows = (v["step.logits_indices"], v["step.row_slots"], v["drafts"])
    where = (v[f"step.{n}"] for n in ("sequence_ids", "query_start_loc", "row_start_loc", "slots"))
    kept = accept_drafts(tokens_R, *rows, *where, v["state.rejected"], v["state.version"], versions)
    newest_R, kept_R, kept_S, drafted_S = kept
    recorded_R = _record(v, tokens_R, newest_R, kept_R)
    if config.prompt_lookup_max:
        next_R = torch.index_select(v["step.positions"], 0, v["step.logits_indices"]) + 1
        lengths = (config.prompt_lookup_min, config.prompt_lookup_max)
        slots = (v["step.row_slots"], newest_R)
        runs_R = ngram_drafts(tokens_R, next_R, *slots, v["state.history"], v["state.drafts"], *lengths)
        return recorded_R, kept_S, runs_R
    return recorded_R, kept_S, drafted_S


def _verify_tree(v: Values, logits: str, tree: TokenTree | DynamicTree) -> tuple[Tensor, ...]:
    sampled_R = _sample(v, logits)
    rows = (v["step.row_slots"], v["drafts"], v["step.logits_indices"])
    where = (v[f"step.{n}"] for n in ("sequence_ids", "query_start_loc", "row_start_loc", "slots"))
    states = (v["state.rejected"], v["state.path"])
    if isinstance(tree, DynamicTree):
        nodes = (torch.index_select(v[f"state.{n}"], 0, v["step.slots"]) for n in tree_nodes.STATES)
        kept = accept_dynamic_tree(sampled_R, *rows, *where, *states, *nodes, tree.levels)
    else:
        kept = accept_tree(sampled_R, *rows, *where, *states, tree.parents)
    tokens_R, rows_R, newest_R, kept_R, kept_S, drafted_S, path_SD = kept
    return _record(v, tokens_R, newest_R, kept_R), kept_S, drafted_S, rows_R, path_SD, sampled_R


def _keep_path(v: Values, caches: Iterable[tuple[str, int]]) -> tuple[()]:
    for name, group in caches:
        where = (v[f"step.block_table.{group}"], v["step.query_start_loc"], v["step.seq_lens"])
        keep_path(v[name], *where, v["path"], v["kept"])
    return ()


def _process(v: Values) -> tuple[Tensor]:
    rows = ("row_slots", "mask_row", "mask", "bias_count")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    state = ("counts", "bias_token", "bias_value")
    # Without drafts none is read: each place is 0. Not the ids: they would be one output more of the first piece.
    drafts_T = v["drafts" if "drafts" in v else "step.positions"]
    given = (*(v[f"step.{n}"] for n in rows + penalties), *(v[f"state.{n}"] for n in state))
    drafted = (drafts_T, v["step.logits_indices"], v["step.draft_place"], v.get("step.ancestors"))
    return (process_logits(v["logits"], *given, *drafted),)
