"""ALiBi by further channels of heads, beside transformers' slopes and float64 at positions up to 65,535."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from graphllm.compile.layout import plan_layout
from graphllm.config import ConfigError, EngineArgs
from graphllm.config.fields import MAX_MODEL_LEN
from graphllm.ir import AttentionMetadata, ForwardContext
from graphllm.ir.registry import load_models
from graphllm.loading.artifact.resolve import compile_config
from graphllm.model_defs.alibi import (
    LONGEST,
    alibi_attention,
    position_channels,
    slope_weight,
    slopes_of,
    width,
)

BLOCK = 16
BLOOM = {"architectures": ["BloomForCausalLM"], "hidden_size": 1024}
MPT = {"architectures": ["MptForCausalLM"], "d_model": 1024}


def _config(hf: dict[str, Any]) -> Any:
    return load_models()[hf["architectures"][0]].config(hf)


@pytest.mark.parametrize("H", [1, 2, 3, 8, 12, 32, 71, 112])
def test_slopes_are_those_of_transformers(H: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2), H, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(slopes_of(H)), theirs, rtol=1e-6, atol=0)
    first, second = build_mpt_alibi_tensor(H, 2)[:, 0].unbind(1)
    own = torch.tensor(_config(MPT | {"d_model": 16 * H, "n_heads": H}).slopes)
    torch.testing.assert_close(own, second - first, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("E", [64, 128])
def test_the_products_are_slope_times_position(E: int, dtype: torch.dtype) -> None:
    """As exactly as float32 has the slope, in every dtype and at every position."""
    slopes, scale = slopes_of(71), E**-0.5
    weight = slope_weight(slopes, E, scale)
    assert weight.value is not None
    queries = torch.tensor(weight.value).view(weight.shape).to(dtype)
    positions = torch.arange(LONGEST, dtype=torch.int32)
    bias = queries.double() @ position_channels(positions, E, dtype).double().T * scale
    expected = torch.tensor(slopes).double()[:, None] * positions
    torch.testing.assert_close(bias, expected, rtol=1e-5 if dtype == torch.float16 else 2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [300, 8192])
@torch.no_grad()
def test_attention(length: int, dtype: torch.dtype) -> None:
    """The last rows of a sequence whose keys are in the cache: as far from float64 as attention without ALiBi, but for
    the last bit of a score in float32, which has slope * j in it, as it has in transformers."""
    H, K, E, n = 8, 2, 64, 5
    draw = torch.Generator().manual_seed(length)
    q = torch.randn(n, H, E, generator=draw).to(dtype)
    k, v = torch.randn(2, length, K, E, generator=draw).to(dtype)
    plain = {torch.bfloat16: 4e-3, torch.float32: 2e-6}[dtype]
    steep = slopes_of(H)
    for slopes in ((0.0,) * H, steep, tuple(slope / 64 for slope in steep)):
        assert _error(q, k, v, slopes) < plain + max(slopes) * length * 2**-24


def _error(q_THE: Tensor, k_LKE: Tensor, v_LKE: Tensor, slopes: tuple[float, ...]) -> float:
    """Of rows that are the last ones of a sequence, relative to the largest of float64."""
    (n, H, E), (length, K) = q_THE.shape, k_LKE.shape[:2]
    scale, dtype, wide = E**-0.5, q_THE.dtype, width(E)
    channels = position_channels(torch.arange(length, dtype=torch.int32), E, dtype)
    weight = slope_weight(slopes, E, scale)
    assert weight.value is not None
    cache = torch.zeros(-(-length // BLOCK), 2, K, BLOCK, wide, dtype=dtype)
    rows = cache.permute(1, 0, 3, 2, 4).flatten(1, 2)  # a copy, [2, L, K, wide]
    rows[0, :length] = torch.cat((k_LKE, channels[:, None].expand(-1, K, -1)), 2)
    rows[1, :length, :, :E] = v_LKE
    cache.copy_(rows.unflatten(1, (-1, BLOCK)).permute(1, 0, 3, 2, 4))
    own = slice(length - n, length)
    attn = AttentionMetadata(
        torch.arange(len(cache), dtype=torch.int32)[None], torch.tensor([0, n]).int(), torch.tensor([length]).int()
    )
    ctx = ForwardContext(SimpleNamespace(), SimpleNamespace(kv=cache), attn, (channels[own],))
    numbers = torch.tensor(weight.value).view(weight.shape).to(dtype)
    found = alibi_attention((q_THE, k_LKE[own], v_LKE[own]), numbers, ctx, scale)

    keys, values = (t.double().repeat_interleave(H // K, 1) for t in (k_LKE, v_LKE))
    scores = torch.einsum("the,lhe->htl", q_THE.double(), keys) * scale
    distance = torch.arange(length)[None] - torch.arange(length - n, length)[:, None]
    scores += torch.tensor(slopes).double()[:, None, None] * distance
    scores.masked_fill_(distance > 0, float("-inf"))
    expected = torch.einsum("htl,lhe->the", scores.softmax(-1), values)
    assert found.shape == expected.shape
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_the_cache_is_not_rounded(dtype: Literal["fp8", "int8"]) -> None:
    """Digits would not be exact."""
    config = compile_config(BLOOM, EngineArgs(target="cpu", max_model_len=64, kv_cache_dtype=dtype))
    with pytest.raises(ConfigError, match=f"kv_cache_dtype is {dtype}.*that can be rounded; use auto"):
        plan_layout(load_models()["BloomForCausalLM"], _config(BLOOM), config)


@pytest.mark.parametrize(
    ("hf", "name"),
    [(BLOOM | {"seq_length": LONGEST + 1}, "seq_length"), (MPT | {"max_seq_len": LONGEST + 1}, "max_seq_len"),
     (BLOOM | {MAX_MODEL_LEN: LONGEST + 1}, MAX_MODEL_LEN)],
)  # fmt: skip
def test_more_positions_are_refused(hf: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {LONGEST + 1}.*set it to {LONGEST} or less"):
        _config(hf)
