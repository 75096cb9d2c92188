"""embedding: the rows of a table."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def round_to(value: float, dtype: torch.dtype) -> float:
    """The nearest value that the dtype holds (ties to even); plain arithmetic, so that tracers see a constant."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2**bits), exponent - bits)


def _cost(token_ids_T: Tensor, table_VD: Tensor, scale: float) -> Cost:
    out = token_ids_T.numel() * table_VD.shape[1]
    return Cost(nbytes(token_ids_T) + 2 * out * table_VD.element_size(), out if scale != 1.0 else 0)


@op(cost=_cost, rowwise=True)
def embedding(token_ids_T: Tensor, table_VD: Tensor, scale: float = 1.0) -> Tensor:
    """table_VD[token_ids_T] * scale: [T, D] in the table's dtype.

    token_ids_T [T] int32 or int64, each in [0, V), or an index error on the CPU and undefined rows elsewhere.
    table_VD [V, D]. scale: rounded to the table's dtype first, as Gemma's sqrt(D) is. Source: Vaswani et al. 2017, 3.4.
    """
    rows_TD = torch.nn.functional.embedding(token_ids_T, table_VD)
    return rows_TD if scale == 1.0 else rows_TD * round_to(scale, table_VD.dtype)
