"""gguf_linear: x @ weight.T + bias with the weight as blocks of a GGUF file."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.encodings.gguf_blocks import dequantize
from graphllm.ops.gemm.quant_linear.op import wide_product


def _cost(x_TI: Tensor, tiles_BGN: Tensor, rows: int, bias_O: Tensor | None, gated: bool) -> Cost:
    products = x_TI.shape[0] * rows
    written = products // (2 if gated else 1) * x_TI.element_size()
    return Cost(nbytes(x_TI, tiles_BGN, bias_O) + written, 2 * products * x_TI.shape[1])


@op(cost=_cost, rowwise=True)
def gguf_linear(
    x_TI: Tensor, tiles_BGN: Tensor, kind: str, rows: int, bias_O: Tensor | None = None, gated: bool = False
) -> Tensor:
    """x_TI [T, I] times a weight [O, I] transposed, plus bias_O [O]; returns [T, O] in x's dtype. gated: the O results
    are a gate and a value half; `swiglu` makes [T, O / 2] of them.

    tiles_BGN: the weight's blocks as `graphllm.ops.encodings.gguf_blocks.tiles` lays them out, uint8; kind: their type,
    a key of `TILED`. rows: O. I is a whole number of blocks. Rows that pad the last tile may be anything finite.

    Products of the exact weights accumulate in float32 (float64 for float64 inputs); one rounding to x's dtype at the
    end. An implementation may keep float32 up to the gate's result; the reference rounds before the gate.
    """
    return wide_product(x_TI, dequantize(tiles_BGN, kind, rows), bias_O, gated)


@gguf_linear.fake(traceable=True)
def _(x_TI: Tensor, rows: int, gated: bool) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], rows // (2 if gated else 1))
