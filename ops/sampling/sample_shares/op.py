"""sample_shares: `sample` where every rank has the logits of a part of the vocabulary."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ir.groups import TENSOR
from graphllm.ops.collectives.all_gather import all_gather
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample.operands import Sampling


def _cost(logits_SN: Tensor) -> Cost:
    return Cost(nbytes(logits_SN), 12 * logits_SN.numel())


@op(boundary=True, collective=True, cost=_cost)
def sample_shares(logits_SN: Tensor, sampling: Sampling, ranks: int, width: int) -> Tensor:
    """`sample` of the logits that `all_gather` makes with ``ranks`` and ``width``: the same token ids on each rank.

    logits_SN [S, N]: of this rank's tokens. The rest as for `sample`; every rank has the same. An implementation need
    not put the logits together.
    """
    logits_SV = all_gather.reference(logits_SN, TENSOR, ranks, width)
    return sample.reference(logits_SV, sampling)


@sample_shares.fake
def _(logits_SN: Tensor) -> Tensor:
    return sample.overload(*([logits_SN] * 7))
