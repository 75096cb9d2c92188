"""gguf_embedding: the rows of a table that is kept as blocks of a GGUF file."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.embeddings.embedding.op import round_to
from graphllm.ops.encodings.gguf_blocks import ROWS, TILED, dequantize


def _cost(token_ids_T: Tensor, tiles_BGN: Tensor, kind: str) -> Cost:
    inner = tiles_BGN.shape[1] * TILED[kind].entries
    read = token_ids_T.numel() * tiles_BGN.shape[1] * TILED[kind].nbytes
    return Cost(nbytes(token_ids_T) + read + token_ids_T.numel() * inner * 2, 2 * token_ids_T.numel() * inner)


@op(cost=_cost, rowwise=True)
def gguf_embedding(token_ids_T: Tensor, tiles_BGN: Tensor, kind: str, dtype: str, scale: float = 1.0) -> Tensor:
    """Rows token_ids_T of a table [V, D], rounded to ``dtype``, times ``scale``: [T, D].

    token_ids_T [T] int32 or int64, each in [0, V). tiles_BGN, kind: as for `gguf_linear`. dtype: the name of torch's.
    scale: as for `embedding`.
    """
    to: torch.dtype = getattr(torch, dtype)
    ids = token_ids_T.long()
    rows = dequantize(tiles_BGN[ids // ROWS], kind, ROWS * ids.shape[0]).unflatten(0, (-1, ROWS))
    rows_TD = rows[torch.arange(ids.shape[0], device=ids.device), ids % ROWS].to(to)
    return rows_TD if scale == 1.0 else rows_TD * round_to(scale, to)


@gguf_embedding.fake
def _(token_ids_T: Tensor, tiles_BGN: Tensor, kind: str, dtype: str) -> Tensor:
    shape = (token_ids_T.shape[0], tiles_BGN.shape[1] * TILED[kind].entries)
    return token_ids_T.new_empty(shape, dtype=getattr(torch, dtype))
