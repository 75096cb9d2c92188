"""Recognizing: a recipe of traced aten ops becomes one over ours, by what it computes and never by a class's name."""

from __future__ import annotations

from collections.abc import Mapping

from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.compile.transformers_model.recognize.caps import find_caps
from graphllm.compile.transformers_model.recognize.draft import Draft
from graphllm.compile.transformers_model.recognize.embeddings import find_embeddings
from graphllm.compile.transformers_model.recognize.forms.cleaning import clean
from graphllm.compile.transformers_model.recognize.forms.layouts import put_tokens_first
from graphllm.compile.transformers_model.recognize.forms.units import drop_units
from graphllm.compile.transformers_model.recognize.gates import find_gates
from graphllm.compile.transformers_model.recognize.head_norms import join_head_norms
from graphllm.compile.transformers_model.recognize.linears import find_linears
from graphllm.compile.transformers_model.recognize.norms import find_norms
from graphllm.compile.transformers_model.recognize.remains import name_remains
from graphllm.compile.transformers_model.recognize.rotary import find_rotations
from graphllm.compile.transformers_model.recognize.scores import find_scales
from graphllm.compile.transformers_model.recognize.shards import divide_weights
from graphllm.compile.transformers_model.recognize.splits import join_parts

_STEPS = (
    clean, join_head_norms, drop_units, put_tokens_first, clean, find_scales, find_norms, clean, find_rotations,
    find_embeddings, find_linears, drop_units, clean, find_gates, find_caps, clean,
)  # fmt: skip


def recognized(recipe: Recipe, plan: Mapping[str, str]) -> Recipe:
    """The recipe over our ops, with `shard`, `heads` and merged `sources` of its weights, and notes of what stayed.

    It computes the same: products and sums are those of the recipe, casts between float32 and the model's dtype may be
    elsewhere. plan: transformers' word ("colwise", ...) for patterns of module names, for tensor parallelism.
    """
    draft = Draft(recipe)
    for step in _STEPS:
        step(draft)
    divide_weights(draft, plan)
    join_parts(draft)
    name_remains(draft)
    return draft.recipe()
