"""gguf_linear on the CPU: tiles are read once as a stream, and rows of x are rounded to int8 on the way, each group of
entries that share a scale of the weight by itself. With AMX, steps of 32 and more rows of bfloat16 keep x."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite
from graphllm.ops.encodings.gguf_blocks import ROWS, TILED
from graphllm.ops.gemm.gguf_linear.op import gguf_linear

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}

_kernels = {
    (kind, x): CKernel(
        f"graphllm_gguf_linear_{kind}_{name}",
        "(Tensor x, Tensor tiles, Tensor? bias, Tensor(a!) out, SymInt M, SymInt N, SymInt K,"
        " SymInt x_stride, bool gated) -> ()",
        Path(__file__).with_name(f"{kind}.cpp"),
        usual=False,
    )
    for kind in TILED
    for x, name in _DTYPES.items()
}


def _supports(site: CallSite) -> bool:
    x_TI, tiles = site.args["x_TI"], site.args["tiles_BGN"]
    floats = (torch.bfloat16, torch.float16, torch.float32)
    whole = not site.args["gated"] or site.args["rows"] % (2 * ROWS) == 0  # tiles in either half
    return x_TI.dtype in floats and x_TI.stride(-1) == 1 and tiles.is_contiguous() and whole


@gguf_linear.impl("cpu_stream", device="cpu", supports=_supports)
def streaming_gguf_linear(
    x_TI: Tensor, tiles_BGN: Tensor, kind: str, rows: int, bias_O: Tensor | None = None, gated: bool = False
) -> Tensor:
    """As the kernel of `quant_linear`: each group of x's entries is rounded to multiples of a 127th of its largest; the
    integer products of a group are exact, and its sum is scaled and added in float32. With AMX, for 32 rows of bfloat16
    and more, x is taken as it is and weights are rounded to bfloat16. float16 goes through float32."""
    taken = torch.float32 if x_TI.dtype == torch.float16 else x_TI.dtype
    x, bias = x_TI.to(taken), None if bias_O is None else bias_O.to(taken)
    out = x.new_empty((x.shape[0], rows // 2 if gated else rows))
    _kernels[kind, taken](x, tiles_BGN, bias, out, x.shape[0], rows, x.shape[1], x.stride(0), gated)
    return out.to(x_TI.dtype)
