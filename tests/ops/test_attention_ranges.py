"""How many programs attention starts for the sequences of a launch: one artifact serves few long contexts and many."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from graphllm.config import Bucket, Target
from graphllm.ir.op import CallSite
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rows
from graphllm.ops.attention.paged_attention.triton_decode import range_cells, ranges_of
from graphllm.ops.attention.paged_attention.triton_verify import plan_few

H, K, E, P, COLUMNS = 32, 8, 128, 16, 4096  # heads as of an 8B Llama, 65,536 tokens
SLOTS = 4 * 132  # programs of decode that an H200 holds at once


def _step(T: int, S: int) -> tuple[Rows, Paged]:
    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    places = (made(S, COLUMNS, dtype=torch.int32), made(S + 1, dtype=torch.int32), made(S, dtype=torch.int32))
    return Rows(made(T, H, E), made(T, K, E), made(T, K, E)), Paged(made(9, 2, K, P, E), *places)


def _decode_plan(lo: int, hi: int) -> tuple[int, int, int]:
    """Programs of a range, ranges where sequences are many, and at most."""
    rows, paged = _step(hi, hi)
    args = paged_attention.bind((), {**rows._asdict(), **paged._asdict(), "scale": 0.1})
    site = CallSite(args, Target("cuda", ("sm_90", "sms_132"), "H200"), Bucket("decode", lo, hi))
    (config,) = paged_attention.impls["triton_decode"].configs(site)
    return K // config["heads"], config["splits"], config["most"]


def test_few_sequences_of_a_bucket_fill_a_gpu() -> None:
    groups, splits, most = _decode_plan(2, 16)
    for S in range(2, 17):
        assert 0.7 * SLOTS <= S * groups * ranges_of(S, groups, splits, most) <= SLOTS


@pytest.mark.parametrize(("lo", "hi"), [(1, 1), (2, 16), (2, 64), (17, 32), (33, 64), (65, 128), (2, 1024)])
def test_memory_for_the_largest_batch_is_enough_for_all(lo: int, hi: int) -> None:
    groups, splits, most = _decode_plan(lo, hi)
    planned = range_cells(hi, groups, splits, most)
    for S in range(lo, hi + 1):
        ranges = ranges_of(S, groups, splits, most)
        assert splits <= ranges <= most
        assert S * ranges <= range_cells(S, groups, splits, most) <= planned


@pytest.mark.parametrize("T", [2, 16, 40, 2048])
def test_steps_with_prompts_stay_within_bounds(T: int) -> None:
    """Where sequences are few, blocks and ranges of few tokens are as many programs as a GPU holds, or one range each;
    where they are many, only single tokens are left out of the kernel of prompts."""
    for S in range(1, 200):
        few = plan_few(*_step(T, S), None)
        if few.on:
            assert few.splits == 1 or S * K * few.blocks * few.splits <= SLOTS
            assert few.left_out == few.queries * few.blocks >= 2
        else:
            assert S > 64
            assert few.left_out == 1
