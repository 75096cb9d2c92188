"""gguf_embedding on the CPU: whole tiles are decoded, 16 rows for one, which costs less than finding a row's bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.embeddings.embedding.op import round_to
from graphllm.ops.embeddings.gguf_embedding.op import gguf_embedding
from graphllm.ops.encodings.gguf_blocks import TILED

_DTYPES = {"bfloat16": "bf16", "float32": "f32"}

_kernels = {
    (kind, dtype): CKernel(
        f"graphllm_gguf_embedding_{kind}_{name}",
        "(Tensor ids, Tensor tiles, Tensor(a!) out, SymInt T, SymInt D) -> ()",
        Path(__file__).with_name("cpu.cpp"),
    )
    for kind in TILED
    for dtype, name in _DTYPES.items()
}


def _supports(site: CallSite) -> bool:
    return site.args["dtype"] in ("bfloat16", "float16", "float32") and site.args["tiles_BGN"].is_contiguous()


@gguf_embedding.impl("cpu_tiles", device="cpu", supports=_supports, row_order=each_alone)
def decoding_gguf_embedding(
    token_ids_T: Tensor, tiles_BGN: Tensor, kind: str, dtype: str, scale: float = 1.0
) -> Tensor:
    """The exact numbers, rounded once. float16 goes through float32."""
    to: torch.dtype = getattr(torch, dtype)
    taken = "float32" if dtype == "float16" else dtype
    shape = (token_ids_T.shape[0], tiles_BGN.shape[1] * TILED[kind].entries)
    out_TD = token_ids_T.new_empty(shape, dtype=getattr(torch, taken))
    _kernels[kind, taken](token_ids_T.to(torch.int32), tiles_BGN, out_TD, *shape)
    out_TD = out_TD.to(to)
    return out_TD if scale == 1.0 else out_TD * round_to(scale, to)
