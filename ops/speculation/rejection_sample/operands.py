"""What rows with drafts are sampled with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowSampling(NamedTuple):
    """The parameters of R rows, each as of `graphllm.ops.sampling.sample.operands.Sampling`."""

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R: Tensor
    sample_index_R: Tensor


class Proposal(NamedTuple):
    """The drafts of R rows, and which of them are accepted (see `rejection_sample`).

    drafts_R: the token that is expected to come next, negative for none, [R] int32.
    slots_R, place_R: where in draft_probs_NKV the draft's distribution is, [R] int32.
    draft_probs_NKV: the distributions that drafts were drawn from, [N, K, V] float32.
    typical_threshold, typical_alpha: above 0, of typical acceptance.
    synthetic_rate: above 0, the share of drafts that are accepted in a benchmark.
    """

    drafts_R: Tensor
    slots_R: Tensor
    place_R: Tensor
    draft_probs_NKV: Tensor | None = None
    typical_threshold: float = 0.0
    typical_alpha: float = 0.0
    synthetic_rate: float = 0.0
