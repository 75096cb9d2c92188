"""Loads weights of which some stay in the host's memory, where cpu_offload_gb is set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch

from graphllm.config.setting import size_text
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.offloading import BUFFERS, OFFLOADED, plan_offload, weight_groups
from graphllm.runtime.offloading.weights import OffloadedWeights
from graphllm.weights.loading.loader import allocate
from graphllm.weights.loading.readers import Loading
from graphllm.weights.plan.plan import WeightPlan

_log = logging.getLogger(__name__)


def begin_offloaded(
    stored: StoredWeights,
    device: torch.device,
    reads: Collection[str] | None,
    begin: Callable[[Collection[str], Mapping[str, torch.Tensor]], Loading],
) -> Loading:
    """The parameters of a rank; those on the host are finished, the others may still be being read. Their value
    `OFFLOADED` copies them.

    reads: names of the rank's parameters; None for all.
    begin: reads parameters, by their names, into memory of the device.

    Raises ConfigError.
    """
    entries = {entry.name: entry for entry in stored.plan.chosen(reads)}
    tied = {entry.tie for entry in entries.values()}
    own = [name for name, entry in entries.items() if not entry.tie and name not in tied]
    groups = weight_groups(stored.artifact.program, own)
    wanted = round(stored.config.load.cpu_offload_gb * 2**30)
    plan = plan_offload(groups, {name: entries[name].nbytes for name in own}, wanted)
    shapes = {name: (entries[name].shape, entries[name].dtype) for names in plan.groups for name in names}
    weights = OffloadedWeights(plan, shapes, device)
    for number, names in enumerate(plan.groups):  # by way of the device, which makes them as it makes the others
        weights.clear(number)
        with begin(names, {name: weights.views[name] for name in names}) as loading:
            loading.finish()
        weights.keep(number)
    _report(weights)
    rest = [name for name in entries if name not in weights.views]
    loading = begin(rest, allocate(WeightPlan(tuple(entries[name] for name in rest)), device))
    cast(dict[str, Any], loading.tensors).update({**weights.views, OFFLOADED: weights})
    return loading


def _report(weights: OffloadedWeights) -> None:
    plan, rate = weights.plan, weights.rate()
    _log.info(
        "cpu_offload_gb: %s of weights are on the host, in %d groups; %d buffers of %s are on the device. A step "
        "copies them in %.3f s, at %.1f GB/s as measured",
        size_text(plan.total), len(plan.groups), BUFFERS, size_text(plan.buffer), plan.total / rate, rate / 1e9,
    )  # fmt: skip
