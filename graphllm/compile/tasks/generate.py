"""Generating: what resolves token ids before a graph's own units, and the programs that sample from its logits.

Their inputs and states are declared here as models declare theirs; the ops say what each one means. What verification
of drafts adds is in `graphllm.compile.tasks.verification`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from graphllm.compile.tasks.draft_family import reads
from graphllm.compile.tasks.task import ProgramUnits, Task, TaskUnit, Values
from graphllm.compile.tasks.verified_trees import verification_of
from graphllm.config import CompileConfig, ConfigError
from graphllm.config.compilation import ranked_logprobs
from graphllm.config.requests.sampling_params import sampling_columns
from graphllm.ir.graph import TensorSpec
from graphllm.ir.model import Graph, Model
from graphllm.ops.rows.store_rows import store_rows
from graphllm.ops.sampling.process_logits import process_logits
from graphllm.ops.sampling.token_logprobs import token_logprobs
from graphllm.program.specs import InputSpec, OutputSpec, StateSpec

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


class Generate(Task):
    """The task of a language model.

    verification: how a step verifies drafts.
    drafter: the graph that drafts for it, if the model has one.
    hidden: what the drafter reads of its hidden states.
    """

    head_outputs = ("logits",)

    def __init__(self, model: Model, graph: Graph, c: Any, config: CompileConfig) -> None:
        super().__init__(model, graph, c, config)
        self.verification = verification_of(config)
        self.drafter = next((g for g in model.graphs if g.task == "draft"), None)
        self.hidden = None if self.drafter is None else reads(self.drafter, graph, c)

    def check(self, layers: Sequence[Sequence[StateSpec]]) -> None:
        self.verification.check(self.model, self.c, layers)
        if self.config.draft_sample_method == "probabilistic" and self.drafter is None:
            raise ConfigError(
                "draft_sample_method is probabilistic, but there is no draft model that draws; use greedy"
            )

    def inputs(self) -> tuple[InputSpec, ...]:
        """Of every sampled row, in the order in which they are staged; rows that nobody asked for get neutral values.

        The mask comes last, so that steps without one need not copy it.
        """

        def rows(name: str, dtype: str, neutral: float = 0) -> InputSpec:
            return InputSpec(name, ("R",), dtype, neutral=neutral)

        return (
            *(rows(column.name, column.dtype, column.neutral) for column in sampling_columns()),
            rows("sample_index", "int32"),
            rows("row_slots", "int32", self.config.max_num_seqs),  # the scrap one
            rows("counted", "int32"),
            rows("mask_row", "int32", -1),
            rows("bias_count", "int32"),
            rows("draft_place", "int32"),
            rows("target", "int32", -1),
            rows("wanted", "int32", -1),
            InputSpec("mask", ("R", -(-self.c.V // 32)), late=True),
            # Read only where drafts are verified: the sequence of each token, whether the step in flight verifies
            # drafts of a sequence, and where its rows begin.
            InputSpec("sequence_ids", ("T",)),
            InputSpec("pending", ("S",)),
            InputSpec("row_start_loc", ("S + 1",), padding="last"),
            *self.verification.inputs(),
        )

    def states(self) -> tuple[StateSpec, ...]:
        """What sampling keeps of each running sequence."""
        biases = self.config.max_logit_bias
        return (
            *self.verification.states(),
            StateSpec("last_token", "slot", (), "int32", "none"),
            StateSpec("counts", "slot", (self.c.V,), "int32", "none"),
            StateSpec("bias_token", "slot", (biases,), "int32", "none"),
            StateSpec("bias_value", "slot", (biases,), "float32", "none"),
        )

    def outputs(self, head: Sequence[TensorSpec]) -> tuple[OutputSpec, ...]:
        return OUTPUTS

    def programs(self, inputs: Collection[InputSpec], caches: Sequence[tuple[str, int]]) -> Mapping[str, ProgramUnits]:
        """ "plain" samples from the logits. "full" has the parts "adjust" (logits to "adjusted"), "sample" and
        "logprobs" ("scores"), for steps in which a request asks for more."""
        verification = self.verification
        before = (verification.resolve(inputs), *(() if self.drafter is None else (KEEP_IDS,)))
        after = verification.after_sampling(caches)
        # With several ranks, no rank need have the logits of all tokens: `compile.rewrites.sample_from_shares`.
        left_out = ("logits",) if self.config.tensor_parallel_size > 1 else ()

        def logprobs(v: Values) -> tuple[Tensor]:
            most = ranked_logprobs(self.config.max_logprobs)
            tokens_R = verification.row_tokens(v)
            return (
                verification.kept_rows(
                    token_logprobs(v["logits"], tokens_R, v["step.target"], v["step.wanted"], most), v
                ),
            )

        return {
            "plain": ProgramUnits(before, (verification.sample("sample", "logits"), *after), not_results=left_out),
            "full": ProgramUnits(
                before,
                (
                    TaskUnit("process_logits", _process, ("adjusted",), part="adjust"),
                    verification.sample("sample_adjusted", "adjusted", part="sample"),
                    *after,
                    TaskUnit("logprobs", logprobs, ("scores",), part="logprobs"),
                ),
            ),
        }


def _process(v: Values) -> tuple[Tensor]:
    rows = ("row_slots", "mask_row", "mask", "bias_count")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    state = ("counts", "bias_token", "bias_value")
    # Without drafts none is read: each place is 0. Not the ids: they would be one output more of the first piece.
    drafts_T = v["drafts" if "drafts" in v else "step.positions"]
    given = (*(v[f"step.{n}"] for n in rows + penalties), *(v[f"state.{n}"] for n in state))
    drafted = (drafts_T, v["step.logits_indices"], v["step.draft_place"], v.get("step.ancestors"))
    return (process_logits(v["logits"], *given, *drafted),)


def _keep_ids(v: Values) -> tuple[()]:
    store_rows(v["step.token_ids"], v["state.step_ids"])
    store_rows(v["step.positions"], v["state.step_positions"])
    return ()


# What a draft graph reads of the step; it comes after the unit that resolves token ids.
KEEP_IDS = TaskUnit("keep_ids", _keep_ids, ())
