"""add_embedding_lora: what the low-rank adapters of a step's tokens add to the rows of an embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.embeddings.embedding.op import round_to


def _cost(y_TD: Tensor, token_ids_T: Tensor, a_LVr: Tensor, b_LrD: Tensor, adapter_ids_T: Tensor) -> Cost:
    T, (_, r, D) = y_TD.shape[0], b_LrD.shape
    read = nbytes(token_ids_T, adapter_ids_T) + T * r * a_LVr.element_size() + nbytes(b_LrD[:1])
    return Cost(read + 2 * nbytes(y_TD), 2 * T * r * D)


@op(cost=_cost, rowwise=True, neutral=("adapter_ids_T", "y_TD"))
def add_embedding_lora(
    y_TD: Tensor, token_ids_T: Tensor, a_LVr: Tensor, b_LrD: Tensor, adapter_ids_T: Tensor, scale: float = 1.0
) -> Tensor:
    """y + scale * (A[token] @ B) for the A and B that each token's adapter has in the tables; [T, D] in y's dtype,
    contiguous.

    y_TD [T, D]: what `embedding` makes of token_ids_T [T], with that scale. a_LVr [L, V, r]: a row for each token;
    b_LrD [L, r, D]; both in y's dtype. adapter_ids_T [T] int32: entries of the tables, 0 for tokens without an adapter:
    their rows stay as they are; entry 0 is never read. Smaller ranks are padded with zeros. scale: rounded to y's dtype
    first.

    Products accumulate in float32 (float64 for float64 inputs) and are added to y before the one rounding to its dtype.
    Source: Hu et al. 2021, of an embedding as the matrix of a product with one-hot rows.
    """
    wide = torch.promote_types(y_TD.dtype, torch.float32)
    L, V = a_LVr.shape[:2]
    place_T = adapter_ids_T.clamp(min=1).long() * V + token_ids_T.long()
    low_Tr = a_LVr.flatten(0, 1)[place_T].to(wide)
    own_TL = adapter_ids_T[:, None] == torch.arange(1, L, device=adapter_ids_T.device)
    low_TLr = torch.where(own_TL[:, :, None], low_Tr[:, None], 0.0)
    delta_TD = low_TLr.flatten(1) @ b_LrD[1:].flatten(0, 1).to(wide)
    return (y_TD.to(wide) + delta_TD * round_to(scale, y_TD.dtype)).to(y_TD.dtype)


@add_embedding_lora.fake(traceable=True)
def _(y_TD: Tensor) -> Tensor:
    return torch.empty_like(y_TD, memory_format=torch.contiguous_format)
