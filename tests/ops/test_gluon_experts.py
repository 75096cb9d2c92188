"""What can be checked without a GPU of kernels in Gluon with weights of four bits: how codes become numbers, by the
kernels' instructions carried out here, and the order of experts, by Triton's interpreter."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

import triton

from graphllm.ops.encodings.encoded_weights import decoded
from graphllm.ops.gemm.fused_linear import gluon_int4
from graphllm.ops.moe.fused_moe import gluon_experts
from graphllm.ops.moe.fused_moe.gluon_tokens import place_rows_kernel

MASK = (1 << 32) - 1


def _run(text: str, registers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The registers, int64 with 32 bits of each, after PTX's instructions."""

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for opcode, to, operands in re.findall(r"(\w+(?:\.\w+)+) ([$\w]+), ([^;]+);", text):
        a, b, c, table = ([value(name) for name in operands.split(", ")] + [torch.tensor(0)] * 3)[:4]
        if opcode == "lop3.b32":
            assert table == 0xEA
            registers[to] = (a & b) | c
        elif opcode == "mov.b32":
            registers[to] = a
        elif opcode == "mul.rn.bf16x2":
            halves = [_bf16(a >> shift) * _bf16(b >> shift) for shift in (0, 16)]
            low, high = (h.view(torch.int16).long() & 0xFFFF for h in halves)
            registers[to] = low | (high << 16)
        else:
            registers[to] = {"and.b32": a & b, "shr.b32": a >> b, "mul.lo.u32": a * b}[opcode] & MASK
    return registers


def _bf16(bits: torch.Tensor) -> torch.Tensor:
    bits = bits & 0xFFFF
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("scale", [64, 127, 190])
def test_every_pair_of_codes_becomes_its_numbers(scale: int) -> None:
    text = gluon_experts._decoding.fn()
    word = torch.arange(1 << 16)
    other = word.flip(0)
    factor = torch.tensor(scale * 0x00800080 + 0x1F801F80)
    found = _run(text, {"$4": word | (other << 16), **{f"${5 + 2 * j}": factor for j in range(4)}})
    rows = torch.stack([word, other], 1).to(torch.int16).repeat(1, 16)  # a span of 32 numbers
    scales = torch.full((4, len(rows)), scale, dtype=torch.uint8)
    want = decoded(rows, scales, None, "e2m1", 32, 128).double() * 2.0**-63
    for j in range(4):
        assert torch.equal(_bf16(found[f"${j}"]).double(), want[:, 32 * j])
        assert torch.equal(_bf16(found[f"${j}"] >> 16).double(), want[:, 32 * j + 1])


def test_every_pair_of_int4_codes_becomes_its_numbers() -> None:
    """Of both groups of a span."""
    word = torch.arange(1 << 16)
    other = word.flip(0)
    rows = torch.stack([word, other], 1).to(torch.int16).repeat(1, 32)  # a span of 64 numbers
    want = decoded(rows, torch.ones(2, len(rows)), None, "int4", 128, 256) + 136
    for half in range(2):
        found = _run(gluon_int4._decoding.fn(half), {"$2": word | (other << 16)})
        for j in range(2):
            first = 64 * (2 * half + j)
            assert torch.equal(_bf16(found[f"${j}"]).float(), want[:, first])
            assert torch.equal(_bf16(found[f"${j}"] >> 16).float(), want[:, first + 1])


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="by the interpreter")
def test_pairs_lie_in_the_order_of_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    T, A, N, K = 9, 2, 5, 40
    x = torch.randn(T, K, generator=generator).bfloat16()
    experts = torch.stack([torch.randperm(N, generator=generator)[:A] for _ in range(T)]).int()
    experts[experts == 3] = -1  # an expert without tokens, and tokens without an expert
    rows, order, table = torch.zeros(T * A, K).bfloat16(), torch.full((T * A,), -9).int(), torch.full((N, 2), -9).int()
    place_rows_kernel[(T * A + N,)](
        x, experts, rows, order, table, T * A, X_ROW=K, K=K, A=A, P_PAD=32, BLOCK=64, EMULATED=True
    )
    flat = experts.flatten().tolist()
    want = [p for n in range(N) for p in range(T * A) if flat[p] == n]
    assert order[: len(want)].tolist() == want
    assert torch.equal(rows[: len(want)], x[torch.tensor(want) // A])
    assert table.tolist() == [[sum(0 <= e < n for e in flat), flat.count(n)] for n in range(N)]
