"""ALiBi: a bias of each head that falls linearly with the distance of a key, as Falcon-RW, BLOOM and MPT have it.

No kernel knows of it. Softmax does not see what the scores of a row have in common, so slope * (j - i) may be
slope * j, of the key's position j alone: a product of a number of the query's head and one of the key. Heads get
further channels for it. Keys have the digits j // 256 and j % 256, queries the slope, times 256 and times 1.

Precision: bfloat16 has 8 bits, so digits are exact, but a slope is not. It is the sum of three numbers of 8 bits each,
with channels of their own, which together are as exact as float32. What is left is the float32 sum of a score, with
slope * j in it: at position 8,192 and a slope of 0.7 its last bit is 0.0005, less than the last bit of a weight in
bfloat16.

Cost: `CHANNELS` numbers, and more up to whole vectors of 16, which the kernels read fastest; values have zeros there.
Heads of 64 become 80 and of 128 become 144, so the cache is 25 % or 12.5 % larger; heads of 112 become 128.
Cached keys are not rounded to 8 bits, in which digits would not be exact.

Source: Press, Smith & Lewis 2021.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MAX_MODEL_LEN, MOST, whole
from graphllm.ir import ForwardContext, StateSpec, Weight
from graphllm.model_defs.common import HF
from graphllm.ops.attention.paged_attention import kv_state, paged_attention

_BASE = 256  # of the digits of positions: bfloat16 has all whole numbers up to it
_PIECES = 3  # of a slope
CHANNELS = 2 * _PIECES
_VECTOR = 16
LONGEST = _BASE * _BASE


def slopes_of(H: int) -> tuple[float, ...]:
    """The slope of each of H heads, as in the paper: of BLOOM and Falcon."""
    power = 1 << (H.bit_length() - 1)
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return tuple(first + [2 ** (-4 * i / power) for i in range(1, 2 * (H - power), 2)])


def position_range(hf: HF, field: str, usual: int) -> int:
    """The positions that a file names in a field. usual: where it does not. Raises ConfigError for more than digits can
    tell apart, of the file or of the engine's longest context."""
    for name in (field, MAX_MODEL_LEN):
        if whole(hf, name, usual, usual, le=MOST) > LONGEST:
            raise ConfigError(
                f"config.json: {name} is {hf[name]}, which is not supported; ALiBi is computed for at most {LONGEST} "
                f"positions, so set it to {LONGEST} or less"
            )
    return whole(hf, field, usual, usual, le=MOST)


def width(E: int) -> int:
    """Numbers of a head of E with the further channels."""
    return -(-(E + CHANNELS) // _VECTOR) * _VECTOR


def slope_weight(slopes: tuple[float, ...], E: int, scale: float) -> Weight:
    """What queries have in their further channels, [H, width(E) - E]. slopes: of each head. scale: factor of the
    products of queries and keys, which applies to these channels as well."""
    rows = [_channels(slope / scale, width(E) - E) for slope in slopes]
    values = tuple(number for row in rows for number in row)
    return Weight((len(rows), width(E) - E), value=values, shard="output", heads=(len(rows),))


def _channels(slope: float, count: int) -> list[float]:
    pieces: list[float] = []
    for _ in range(_PIECES):
        mantissa, exponent = math.frexp(slope - sum(pieces))
        pieces.append(math.ldexp(round(mantissa * 256), exponent - 8))
    return [_BASE * piece for piece in pieces] + pieces + [0.0] * (count - CHANNELS)


def alibi_state(K: int, E: int) -> StateSpec:
    """The cache of a layer."""
    return dataclasses.replace(kv_state(K, width(E)), dtype="model")


def position_channels(positions_T: Tensor, E: int, dtype: torch.dtype) -> Tensor:
    """What keys have in their further channels, [T, width(E) - E]: the same for all heads and layers."""
    digits = ((positions_T // _BASE)[:, None], (positions_T % _BASE)[:, None])
    filling = positions_T.new_zeros(positions_T.shape[0], width(E) - E - CHANNELS)
    return torch.cat((*(digit_T1.expand(-1, _PIECES) for digit_T1 in digits), filling), 1).to(dtype)


def alibi_attention(
    heads: tuple[Tensor, Tensor, Tensor], slopes_HC: Tensor, ctx: ForwardContext, scale: float
) -> Tensor:
    """`paged_attention` with slope * j in its scores, [T, H, E]. heads: queries, keys and values. slopes_HC: of
    `slope_weight`. ctx: ``shared`` are the `position_channels` alone."""
    (q_THE, k_TKE, v_TKE), (channels_TC,) = heads, ctx.shared
    q = torch.cat((q_THE, slopes_HC.expand(q_THE.shape[0], -1, -1)), 2)
    k = torch.cat((k_TKE, channels_TC[:, None].expand(-1, k_TKE.shape[1], -1)), 2)
    v = torch.cat((v_TKE, v_TKE.new_zeros(*v_TKE.shape[:2], channels_TC.shape[1])), 2)
    return paged_attention(q, k, v, ctx.state.kv, *ctx.attn, scale=scale)[..., : q_THE.shape[2]]
