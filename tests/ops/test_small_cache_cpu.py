"""Attention on a CPU with a cache of 8 bits, at every instruction level."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphllm.ir.kernels import c_kernel
from graphllm.ir.testing.check import cases_of, check_impl
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.paged_attention.cpu import cpu_paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rows, Scores
from tests.ops.levels import LEVELS, level_of

KERNELS = [c_kernel(f"graphllm_paged_attention_{t}_{c}") for t in ("f32", "bf16") for c in ("e4m3", "int8")]
CASES = [c for c in cases_of(paged_attention) if ("fp8" in c.name or "int8" in c.name) and c.size == "small"]
E4M3 = torch.arange(256, dtype=torch.uint8)  # every code: 0x7F and 0xFF are NaN


level = level_of(KERNELS, [n if n == "native" else pytest.param(n, marks=pytest.mark.slow) for n in LEVELS])


def number(code: int) -> float:
    """IEEE-like: a sign, four bits of an exponent with bias 7, three of a mantissa; no infinities."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if code & 128 else size


def attended(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, length: int, scales: torch.Tensor | None = None):
    """Of queries of zero, to which all tokens count alike."""
    T, K, E = k.shape
    starts, lengths = torch.tensor([0, T], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    table = torch.arange(cache.shape[0], dtype=torch.int32)[None]
    q = torch.zeros(T, K, E, dtype=k.dtype)
    return cpu_paged_attention(Rows(q, k, v), Paged(cache, table, starts, lengths), Scores(1.0), scales)


@pytest.mark.slow
def test_cases(level: str, threads: int) -> None:
    results = check_impl(paged_attention, paged_attention.impls["cpu"], CASES)
    assert len(results) > 2 * len(CASES)  # rotations are no case of its
    assert [str(r) for r in results if not r.ok] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("E", [256, 248])
def test_every_code_is_read(level: str, dtype: torch.dtype, E: int) -> None:
    codes = E4M3[:E].clone()
    codes[codes & 0x7F == 0x7F] = 0
    cache = torch.zeros(1, 2, 1, 16, E, dtype=torch.uint8)
    cache[0, 1, 0, 0] = codes
    new = torch.zeros(1, 1, E, dtype=dtype)
    found = attended(new, new, cache.view(torch.float8_e4m3fn), 2)
    expected = torch.tensor([number(c) / 2 for c in codes.tolist()], dtype=dtype)
    torch.testing.assert_close(found[0, 0], expected, rtol=1e-6, atol=0)
    integers = torch.zeros(1, 2, 1, 16, E + 4, dtype=torch.int8)
    integers[0, 1, 0].view(-1)[:E] = torch.arange(E).to(torch.int8)
    integers[0, 1, 0].view(-1)[16 * E : 16 * E + 4] = torch.tensor([0.5]).view(torch.int8)
    found = attended(new, new, integers, 2)
    torch.testing.assert_close(found[0, 0], torch.arange(E).to(torch.int8).to(dtype) / 4, rtol=1e-6, atol=0)


def test_every_number_is_rounded_to_the_nearest(level: str) -> None:
    """All bfloat16 but NaN, infinities among them, which become the largest numbers."""
    plain = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    given = plain[~plain.isnan()][: (1 << 16) // 256 * 256 - 512].view(-1, 1, 256)
    cache = torch.zeros(-(-len(given) // 16), 2, 1, 16, 256, dtype=torch.float8_e4m3fn)
    attended(given, given, cache, len(given))
    codes = np.array([number(c) for c in range(127)])
    wanted = given.flatten().double().numpy()
    above = np.searchsorted(codes, np.abs(wanted).clip(max=448), side="left")
    below = np.maximum(above - 1, 0)
    nearer = np.abs(wanted).clip(max=448) - codes[below], codes[above] - np.abs(wanted).clip(max=448)
    chosen = np.where((nearer[0] < nearer[1]) | ((nearer[0] == nearer[1]) & (below % 2 == 0)), below, above)
    written = cache.view(torch.uint8)[:, :, 0].transpose(1, 0).reshape(2, -1, 256)[:, : len(given)].flatten(1).numpy()
    for of in written:
        assert np.array_equal(of & 0x7F, chosen)
        assert np.array_equal(of >> 7, np.signbit(wanted))


def test_rows_of_zeros_and_of_extremes(level: str) -> None:
    """A row of int8 is as exact as its largest number allows, and one of zeros is zeros."""
    rows = torch.tensor([0.0, 1e-30, 1.0, 3e38])[:, None, None] * torch.linspace(-1, 1, 16)
    cache = torch.full((1, 2, 1, 16, 20), 7, dtype=torch.int8)
    found = attended(rows, rows, cache, 4)
    assert torch.equal(found[0], torch.zeros(1, 16))
    entries = cache[0, 0, 0].view(-1)[:64].view(4, 16)
    assert torch.equal(entries[0], torch.zeros(16, dtype=torch.int8))
    for row in entries[1:]:
        assert torch.equal(row, (torch.linspace(-1, 1, 16) * 127).round().to(torch.int8))
