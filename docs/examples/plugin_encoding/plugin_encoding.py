"""block_int8: checkpoints of int8 matrices with one float32 scale for each block of 32 by 32, in two tensors."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

import graphllm.model_defs.llama  # noqa: F401  registers the family that is copied below
from graphllm.ir import Cost, Weight, nbytes, op, register_model
from graphllm.ir.model import all_models
from graphllm.weights.encodings import Encoding, Part, register_encoding

BLOCK = 32

# --- what it means


def scales_shape(rows: int, inner: int) -> tuple[int, int]:
    return (-(-rows // BLOCK), -(-inner // BLOCK))


def spread(scales: Tensor, rows: int, inner: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :inner]


def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
    return parts["values"].float() * spread(parts["scales"], rows, inner)


def encode(numbers: Tensor) -> dict[str, Tensor]:
    rows, inner = numbers.shape
    high, wide = scales_shape(rows, inner)
    blocks = torch.zeros(high * BLOCK, wide * BLOCK, device=numbers.device)
    blocks[:rows, :inner] = numbers
    largest = blocks.view(high, BLOCK, wide, BLOCK).abs().amax((1, 3))
    scales = torch.where(largest == 0, 1.0, largest / 127)
    values = (numbers.float() / spread(scales, rows, inner)).round().to(torch.int8)
    return {"values": values, "scales": scales}


register_encoding(
    Encoding(
        "block_int8",
        parts=(
            Part("values", "int8", lambda rows, inner: (rows, inner)),
            Part("scales", "float32", scales_shape, stored="{source}_scale"),
        ),
        block=(BLOCK, BLOCK),
        op="block_int8_linear",
        decode=decode,
        encode=encode,
    )
)

# --- the op that reads it


def _cost(x_TI: Tensor, values_OI: Tensor, scales_BG: Tensor, bias_O: Tensor | None) -> Cost:
    return Cost(nbytes(x_TI, values_OI, scales_BG, bias_O), 2 * x_TI.shape[0] * values_OI.numel())


@op(cost=_cost, rowwise=True)
def block_int8_linear(
    x_TI: Tensor, values_OI: Tensor, scales_BG: Tensor, rows: int, bias_O: Tensor | None = None
) -> Tensor:
    """x_TI [T, I] times a weight [O, I] in block_int8, transposed, plus bias_O [O]; rows is O."""
    weight_OI = decode({"values": values_OI, "scales": scales_BG}, rows, x_TI.shape[1]).to(x_TI.dtype)
    return torch.nn.functional.linear(x_TI, weight_OI, bias_O)


# --- the checkpoints that have it


def stored(weights: dict[str, Weight]) -> dict[str, Weight]:
    """Every matrix that is read is stored in it; norms and what is computed are not."""
    return {
        name: replace(w, encoding="block_int8") if w.sources and len(w.shape) == 2 else w for name, w in weights.items()
    }


llama = all_models()["LlamaForCausalLM"]
decoder = llama.graphs[0]
register_model(
    replace(
        llama,
        architectures=("BlockInt8LlamaForCausalLM",),
        graphs=(
            replace(
                decoder,
                embed_weights=lambda c: stored(decoder.embed_weights(c)),
                layer_weights=lambda c, layer_type: stored(decoder.layer_weights(c, layer_type)),
                head_weights=lambda c: stored(decoder.head_weights(c)),
            ),
        ),
    )
)
