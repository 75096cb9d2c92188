"""Passes over the weight plan: how weights are stored in the checkpoint, what a rank has of them, and the weights that
settings add. Each returns the plan that is given where the settings do not ask for it."""

from __future__ import annotations

from graphllm.compile.rewrites.contracts import PlanSource
from graphllm.weights.plan import cache_scales, schemes
from graphllm.weights.plan import shard as sharding
from graphllm.weights.plan.plan import WeightPlan


def as_quantized(plan: WeightPlan, source: PlanSource) -> WeightPlan:
    """Weights that a quantized checkpoint stores in encodings of its own."""
    return schemes.as_quantized(plan, source.model_config, source.stored)


def with_cache_scales(plan: WeightPlan, source: PlanSource) -> WeightPlan:
    """Scales of keys and values in 8 bits."""
    if source.config.kv_cache_dtype != "fp8":
        return plan
    return cache_scales.with_cache_scales(plan, source.stored)


def shard(plan: WeightPlan, source: PlanSource) -> WeightPlan:
    """A tensor-parallel rank's share of each weight."""
    config = source.config
    return sharding.shard_plan(
        plan, config.tensor_parallel_size, config.enable_expert_parallel, config.num_redundant_experts
    )


def share_experts(plan: WeightPlan, source: PlanSource) -> WeightPlan:
    """An engine core's share of the experts, where data-parallel cores have them together."""
    if source.config.data_parallel_experts == 1:
        return plan
    return sharding.share_experts(plan, source.config.data_parallel_experts)
