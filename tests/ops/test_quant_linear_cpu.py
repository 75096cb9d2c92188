"""The C++ kernels of quant_linear and quant_moe at every instruction level, against what they say they compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from graphllm.host.libraries import Libraries
from graphllm.ir.kernels import CKernel, c_kernel
from graphllm.ops.gemm.quant_linear.cpu import streaming_quant_linear
from graphllm.ops.gemm.quant_linear.op import dequantize
from graphllm.ops.moe.fused_moe.operands import ExpertLora, Route
from graphllm.ops.moe.quant_moe import quant_moe
from graphllm.ops.moe.quant_moe.cpu import experts_in_turn
from graphllm.ops.moe.quant_moe.op import QuantExperts
from graphllm.weights.formats.integers import INTEGERS, pack
from tests.ops.levels import AMX, LEVELS, PARAMS
from tests.ops.rounding import MANY, TOLERANCE, gated, rounded_x

CompiledFor = Callable[[Sequence[CKernel], Sequence[str]], AbstractContextManager[Path]]
KERNELS = [
    c_kernel(f"graphllm_quant_{op}_{f}_{t}") for op in ("linear", "moe") for f in INTEGERS for t in ("bf16", "f32")
]


@pytest.fixture(scope="module", params=PARAMS)
def library(request: pytest.FixtureRequest, compiled_for: CompiledFor) -> Iterator[Path]:
    """Binds the kernels to a library compiled for the level."""
    with compiled_for(KERNELS, LEVELS[request.param] + ["-O1"] * (request.param == "generic")) as built:
        yield built


@pytest.fixture
def level(library: Path, request: pytest.FixtureRequest) -> str:
    """The level that the kernels are bound to."""
    return str(request.node.callspec.params["library"])


def _packed(rows: int, inner: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    encoding = INTEGERS[name]
    values, scales = (torch.zeros(p.shape(rows, inner), dtype=getattr(torch, p.dtype)) for p in encoding.parts)
    pack(torch.randn(rows, inner) * inner**-0.5, encoding, values, scales)
    return values, scales


def _keeps_x(level: str) -> bool:
    """For MANY rows of bfloat16 and more."""
    return level == "native" and AMX


class Known(NamedTuple):
    """A product, its operands drawn, and what it is with x kept and with x rounded in groups."""

    x: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    out: int
    bias: torch.Tensor | None
    kept: np.ndarray
    rounded: np.ndarray


@functools.cache
def _known(rows: int, name: str) -> list[Known]:
    """Once for all levels and counts of threads."""
    torch.manual_seed(rows)
    found = []
    for out, inner in ((1, 1), (33, 72), (48, 64), (130, 61), (40, 4864), (700, 896)):
        values, scales = _packed(out, inner, name)
        weight = dequantize(values, scales.double(), out, inner).numpy()
        for dtype in TOLERANCE:
            if dtype != torch.bfloat16 and out > 48:
                continue
            x = torch.randn(rows, inner + 8).to(dtype)[:, :inner]
            bias = torch.randn(out).to(dtype) if out % 2 else None
            kept, rounded = (
                given @ weight.T + (0 if bias is None else bias.double().numpy())
                for given in (x.double().numpy(), rounded_x(x, INTEGERS[name].block[1]))
            )
            found.append(Known(x, values, scales, out, bias, kept, rounded))
    return found


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11, 12, 13, 24, 31, 32, 33, 49, 130, 300])
def test_any_size(level: str, threads: int, rows: int, name: str) -> None:
    """Rows in every tile size, outputs that end inside a block, entries inside a group, strided x, with a bias."""
    for x, values, scales, out, bias, kept, rounded in _known(rows, name):
        if x.dtype != torch.bfloat16 and threads == 5:
            continue
        truth = kept if rows >= MANY and x.dtype == torch.bfloat16 and _keeps_x(level) else rounded
        found = streaming_quant_linear(x, values, scales, out, bias)
        assert found.dtype == x.dtype
        error = np.linalg.norm(found.double().numpy() - truth) / np.linalg.norm(truth)
        assert error < TOLERANCE[x.dtype], (out, x.shape[1], x.dtype)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("rows", [1, 3, 13, 40])
def test_gate(level: str, threads: int, rows: int, name: str) -> None:
    torch.manual_seed(rows)
    values, scales = _packed(2 * 144, 200, name)
    weight = dequantize(values, scales.double(), 2 * 144, 200).numpy()
    for dtype in TOLERANCE:
        x, bias = 4 * torch.randn(rows, 200).to(dtype), torch.randn(2 * 144).to(dtype)
        whole = rows >= MANY and dtype == torch.bfloat16 and _keeps_x(level)
        of_x = x.double().numpy() if whole else rounded_x(x, INTEGERS[name].block[1])
        truth = gated(of_x @ weight.T + bias.double().numpy())
        found = streaming_quant_linear(x, values, scales, 2 * 144, bias, gated=True).double().numpy()
        assert np.linalg.norm(found - truth) < TOLERANCE[dtype] * np.linalg.norm(truth)


@pytest.mark.parametrize("name", INTEGERS)
def test_extremes(level: str, name: str) -> None:
    """All integers at their limits and of one sign: nothing saturates or overflows."""
    of_values, of_scales = INTEGERS[name].parts
    shape, scales = of_values.shape(16, 4864), torch.ones(of_scales.shape(16, 4864), dtype=torch.bfloat16)
    limits = (-127, 127) if name == "int8" else (0, 255)
    x = torch.ones(3, 4864)
    x[1] = -1
    x[2, ::2] = -1
    for limit in limits:
        values = torch.full(shape, limit, dtype=getattr(torch, of_values.dtype))
        number = limit if name == "int8" else limit // 16 - 8
        found = streaming_quant_linear(x, values, scales, 16)
        expected = torch.tensor([[4864.0 * number], [-4864.0 * number], [0.0]]).expand(3, 16)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("name", INTEGERS)
def test_zeros_and_what_is_not_finite(level: str, name: str) -> None:
    values, scales = _packed(16, 128, name)
    x = torch.zeros(4, 128)
    x[1, 100] = torch.nan
    x[2, 5] = torch.inf
    x[3, 64:] = 1e-30
    found = streaming_quant_linear(x, values, scales, 16)
    assert torch.equal(found[0], torch.zeros(16))
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert found[3].isfinite().all()


@pytest.mark.parametrize("name", INTEGERS)
def test_bitwise_the_same_for_any_thread_count_and_batch(level: str, name: str) -> None:
    """A row's result depends neither on the threads nor on the other rows, but for the side of MANY with AMX."""
    values, scales = _packed(1000, 896, name)
    few, more = (1, 2, 7, 13), (MANY, 40, 65, 130)
    sides = ((MANY - 1, few), (300, more)) if _keeps_x(level) else ((300, few + more),)
    for rows, fewer in sides:
        x = torch.randn(rows, 896).bfloat16()
        before, results = torch.get_num_threads(), []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(streaming_quant_linear(x, values, scales, 1000))
        torch.set_num_threads(before)
        assert all(torch.equal(r, results[0]) for r in results)
        for count in fewer:
            assert torch.equal(streaming_quant_linear(x[:count], values, scales, 1000), results[0][:count])


def test_without_rows(level: str) -> None:
    values, scales = _packed(16, 64, "int8")
    assert streaming_quant_linear(torch.empty(0, 64).bfloat16(), values, scales, 16).shape == (0, 16)


# ---- experts


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(("T", "several", "biased"), [(1, 7, True), (5, 7, False), (40, 4, True), (300, 7, False)])
def test_experts(level: str, threads: int, name: str, T: int, several: int, biased: bool) -> None:
    """One row an expert, some, and enough for AMX to take them as they are; experts that nobody chose; strided x."""
    torch.manual_seed(T)
    A, D, F = 2, 100, 208
    stacks = [[torch.stack(p) for p in zip(*(_packed(*matrix, name) for _ in range(8)), strict=True)]
              for matrix in ((2 * F, D), (D, F))]  # fmt: skip
    weights, chosen = torch.softmax(torch.randn(T, A), -1), torch.randn(T, several).topk(A, -1).indices.int()
    for dtype in TOLERANCE:
        biases = [torch.randn(8, n).to(dtype) * 0.3 if biased else None for n in (2 * F, D)]
        x = torch.randn(T, D + 8).to(dtype)[:, :D]
        experts = QuantExperts(*stacks[0], *stacks[1], F, "clamped" if biased else "silu", 1.0, *biases)
        given = (experts, Route(weights, chosen))
        found = experts_in_turn(x, *given)
        truth = quant_moe.reference(x.double(), *given)
        assert found.dtype == dtype
        assert float((found - truth).norm() / truth.norm()) < 0.02, dtype
        if dtype == torch.float16:
            continue
        sizes = ((3, 8, 2 * 5, D), (3, 8, 5, 2 * F), (3, 8, 5, F), (3, 8, 5, D))
        tables = [torch.randn(s).div(s[-1] ** 0.5).to(dtype) for s in sizes]
        given = (*given, ExpertLora(*tables, torch.arange(T, dtype=torch.int32) % 3))
        found, truth = experts_in_turn(x, *given), quant_moe.reference(x.double(), *given)
        assert float((found - truth).norm() / truth.norm()) < 0.02, dtype


# ---- rounding and packing


def _parts(rows: int, inner: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed matrix of what nobody may overwrite with anything but its own."""
    values, scales = INTEGERS[name].parts
    whole = torch.full(values.shape(rows, inner), 90, dtype=getattr(torch, values.dtype))
    return whole, torch.full(scales.shape(rows, inner), 5.0, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64], ids=str)
def test_packing_is_bit_by_bit_the_specification(library: Path, name: str, dtype: torch.dtype) -> None:
    """Any size, from any row and group on; strided and transposed; zeros of both signs, subnormal and huge groups."""
    encoding = INTEGERS[name]
    libraries = Libraries([library])
    assert libraries.find(f"graphllm_pack_{name}_f32") is not None
    torch.manual_seed(0)
    for rows, inner, row, entry in (
        *((1, 1, 0, 0), (16, 64, 0, 0), (5, 31, 13, 64), (33, 133, 7, 0), (70, 640, 16, 128), (3, 4864, 2, 0)),
    ):
        numbers = torch.randn(rows + 1, inner + 3)
        numbers[::4] *= 0.02
        numbers[1::5, : inner // 2] = 0.0
        numbers[2::5] *= -0.0
        numbers[3::5, ::2] *= 1e-37
        numbers[4::5] *= 1e-40
        numbers[6::7] = numbers[6::7].abs() * 1e34
        numbers = numbers.to(dtype)
        for given in (numbers[:rows, :inner], numbers[1:, 3:], numbers.T.contiguous().T[:rows, :inner]):
            found, said = (_parts(row + rows + 5, entry + inner + 70, name) for _ in range(2))
            pack(given, encoding, *found, row, entry, libraries)
            pack(given, encoding, *said, row, entry)
            finite = said[1].isfinite()
            assert torch.equal(found[0], said[0]) or not finite.all()
            assert torch.equal(found[1].view(torch.int16)[finite], said[1].view(torch.int16)[finite])
            assert torch.equal(found[1].isfinite(), finite)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_packing_what_is_not_finite(library: Path, name: str, bad: float) -> None:
    """One number makes its group what the specification makes of it, and no other."""
    numbers = torch.ones(16, 192)
    numbers[3, 70] = bad
    found, said = (_parts(16, 192, name) for _ in range(2))
    pack(numbers, INTEGERS[name], *found, libraries=Libraries([library]))
    pack(numbers, INTEGERS[name], *said)
    one, other = (dequantize(*packed, 16, 192) for packed in (found, said))
    assert not one.isfinite().all()
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_packing_without_a_library() -> None:
    numbers, encoding = torch.randn(20, 96), INTEGERS["int8"]
    found, said = _parts(20, 96, "int8"), _parts(20, 96, "int8")
    pack(numbers, encoding, *found, libraries=Libraries())
    pack(numbers, encoding, *said)
    assert torch.equal(found[0], said[0])
    assert torch.equal(found[1], said[1])
