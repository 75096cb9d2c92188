"""Drafting: a draft graph runs after every step of the main graph, on the device.

It runs once over the step's tokens (the program "first"), then in further runs ("next") as its way of drafting needs.

What it reads of the main graph, the step leaves in states of axis "token". What one run hands to the next lies in slot
states. A way of drafting is an object (`Drafting`): one token in each run, several heads, level by level, a block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from graphllm.compile.tasks.blocks import Block
from graphllm.compile.tasks.draft_family import reads
from graphllm.compile.tasks.drafting import DRAWING, Chain, Drafting, Heads, OwnChain
from graphllm.compile.tasks.dynamic_trees import DynamicLevels
from graphllm.compile.tasks.task import ProgramUnits, Task, Values
from graphllm.compile.tasks.trees import Levels
from graphllm.compile.tasks.verified_trees import verification_of
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.model import Drafts, Graph, Hidden, Model
from graphllm.program.program import DraftReach
from graphllm.program.specs import InputSpec, StateSpec

_OF_TREES: dict[type[TokenTree | DynamicTree] | type[None], type[Drafting]] = {
    type(None): Chain, TokenTree: Levels, DynamicTree: DynamicLevels,
}  # fmt: skip


def way_of(graph: Graph, c: Any, config: CompileConfig, hidden: Hidden | None) -> type[Drafting]:
    """How a draft graph drafts."""
    if hidden is None:
        return OwnChain
    if graph.context is not None:
        return Block
    return Heads if graph.drafts_at_once(c) else _OF_TREES[type(config.tree)]


class Draft(Task):
    """The task of a draft graph. drafting: its way."""

    head_outputs = ("drafted",)

    def __init__(self, model: Model, graph: Graph, c: Any, config: CompileConfig) -> None:
        super().__init__(model, graph, c, config)
        hidden = reads(graph, model.graphs[0], c)
        self.drafting = way_of(graph, c, config, hidden)(graph, c, config, hidden, verification_of(config))

    def check(self, layers: Sequence[Sequence[StateSpec]]) -> None:
        config = self.config
        if config.longest_query == 1:
            raise ConfigError("num_speculative_tokens is 0: say how many tokens the draft model is to guess")
        if config.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_max is {config.prompt_lookup_max}, but drafts come from a draft model; leave one out"
            )
        at_once, tree = self.graph.drafts_at_once(self.c), config.tree
        wanted = config.num_speculative_tokens if tree is None else tree.levels
        if 0 < at_once < wanted:
            setting = "num_speculative_tokens is" if tree is None else "speculative_token_tree has paths of"
            does = f"has {at_once} heads" if self.graph.context is None else f"guesses {at_once} tokens at once"
            raise ConfigError(f"{setting} {wanted}: the draft model {does}; give at most that")

    def inputs(self) -> tuple[InputSpec, ...]:
        known = InputSpec("next_tokens", ("S",), provider="next_tokens", neutral=-1)
        drawing = DRAWING if self.drafting.draws else ()
        return (InputSpec("sequence_ids", ("T",)), known, *drawing, *self.drafting.verification.inputs())

    def states(self) -> tuple[StateSpec, ...]:
        return self.drafting.states()

    def buckets(self) -> tuple[Bucket, ...]:
        return self.drafting.buckets()

    def programs(self, inputs: Collection[InputSpec], caches: Sequence[tuple[str, int]]) -> Mapping[str, ProgramUnits]:
        return self.drafting.programs()

    def head(self, made: Any, v: Values) -> tuple[Tensor, ...]:
        """[S, n] int32: the drafts that follow, as many as are wanted at most."""
        return (self.drafting.chosen(made if isinstance(made, Drafts) else Drafts((made,)), v),)

    def reach(self) -> DraftReach:
        return self.drafting.reach()
