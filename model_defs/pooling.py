"""How families make vectors of hidden states: of a sequence the last one, the first, their mean or all, then dense
layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from graphllm.config.pooling_config import DenseLayer, PoolingType, pooling_of
from graphllm.ir import ForwardContext, Weight, select_rows
from graphllm.model_defs.common import HF
from graphllm.ops.gemm.linear import linear
from graphllm.ops.rows.sequence_mean import sequence_mean

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Pooling:
    """A part of a family's Config. kind: which hidden states. dense: the layers that follow."""

    kind: PoolingType
    dense: tuple[DenseLayer, ...] = ()

    @staticmethod
    def from_hf(hf: HF, default: PoolingType) -> Pooling:
        """What a config.json, with what sentence-transformers' files say, asks for. Raises ConfigError."""
        return Pooling(*pooling_of(hf, default))

    def weights(self) -> dict[str, Weight]:
        """The weights of the dense layers, for a family's head_weights."""
        made = {}
        for i, dense in enumerate(self.dense):
            made[f"dense{i}"] = Weight((dense.outputs, dense.inputs), (dense.tensor("weight"),))
            if dense.bias:
                made[f"dense{i}_bias"] = Weight((dense.outputs,), (dense.tensor("bias"),))
        return made

    def __call__(
        self, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext, norm: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Tensor:
        """What a head of the task "pool" returns: [R, D], or [T, D] of all tokens. norm: of rows, before pooling."""
        x = self._pooled(x_TD, ctx, norm)
        for i, dense in enumerate(self.dense):
            weight = getattr(w, f"dense{i}")
            x = _ACTIVATIONS[dense.activation](linear(x.to(weight.dtype), weight, getattr(w, f"dense{i}_bias", None)))
        return x

    def _pooled(self, x_TD: Tensor, ctx: ForwardContext, norm: Callable[[Tensor], Tensor]) -> Tensor:
        if self.kind == "ALL":
            return norm(x_TD)
        if self.kind == "MEAN":
            return sequence_mean(norm(x_TD), ctx.inputs.query_start_loc, ctx.inputs.logits_indices)
        rows = ctx.inputs.logits_indices if self.kind == "LAST" else first_rows(ctx)
        return norm(select_rows(x_TD, rows))


def first_rows(ctx: ForwardContext) -> Tensor:
    """[R]: the row in which the sequence of each wanted row begins; of padding any row."""
    starts, rows = ctx.inputs.query_start_loc, ctx.inputs.logits_indices
    sequence = (starts[1:][None, :] <= rows[:, None]).sum(1)
    return torch.minimum(torch.index_select(starts, 0, sequence), rows)
