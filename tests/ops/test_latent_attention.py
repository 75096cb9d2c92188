"""Latent attention of prompts whose keys and values are made in several chunks, or fit into none; how decode divides
tokens among programs, and how it joins their parts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphllm.config import Target
from graphllm.ir.op import CallSite
from graphllm.ir.registry import load_ops
from graphllm.ir.testing import Maker
from graphllm.ir.testing.check import cases_of, relative_error
from graphllm.ops.attention.latent_attention import LatentRows, PagedLatents, UpProjections

triton = pytest.importorskip("triton")
absorb = pytest.importorskip("graphllm.ops.attention.latent_attention.triton_absorb")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter")


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks(chunks: int) -> None:
    """Prompts that end within a chunk, go on in the next one, and are too long for all of them."""
    op = load_ops()["latent_attention"]
    case = next(c for c in cases_of(op) if c.name == "prompts_ragged")
    maker = Maker(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
    args = op.bind((), case.inputs(maker))
    truth = op.reference(**{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()})
    impl = op.impls["triton_prefill"]
    site = CallSite(args, Target("cuda", ("sm_90", "sms_2"), ""), case.bucket)
    found = impl.fn(**args, **{**impl.configs(site)[0], "chunk": 32, "chunks": chunks})
    assert relative_error(found, truth) < case.tolerance["float32"]


@pytest.mark.parametrize("values", [(1, 16, 16, 2), (4, 32, 32, 1), (8, 16, 16, 4), (32, 32, 32, 16)])
def test_parts_are_joined(values: tuple[int, int, int, int]) -> None:
    """Few rows of a product and many, the latent at once and by pieces, more parts than are read at once and fewer."""
    op = load_ops()["latent_attention"]
    case = next(c for c in cases_of(op) if c.name == "verify_ragged")
    maker = Maker(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
    args = op.bind((), case.inputs(maker))
    truth = op.reference(**{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()})
    impl = op.impls["triton_decode"]
    site = CallSite(args, Target("cuda", ("sm_90", "sms_9"), ""), case.bucket)
    names = ("values_m", "values_v", "values_l", "parts_at_once")
    found = impl.fn(**args, **{**impl.configs(site)[0], **dict(zip(names, values, strict=True))})
    rows = int(args["query_start_loc"][-1])
    assert relative_error(found[:rows], truth[:rows]) < case.tolerance["float32"]


@settings(max_examples=20, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=9),
    programs=st.integers(1, 20),
)
def test_programs_have_equal_shares(sequences: list[tuple[int, int]], programs: int) -> None:
    """Of the tiles of sequences of one or two query tokens; the others count as none."""
    H, N, R, L, V, P, tile = 1, 16, 16, 16, 16, 16, 32
    sequences = [(n, max(n, length)) for n, length in sequences]
    T, S = sum(n for n, _ in sequences), len(sequences)
    rows = LatentRows(*(torch.zeros(T, *of) for of in ((H, N), (H, R), (L,), (R,))))
    up = UpProjections(*(torch.zeros(H, of, L) for of in (N, V)))
    table = torch.arange(S * 6).int().view(S, 6)
    starts = torch.tensor([0, *accumulate(n for n, _ in sequences)]).int()
    paged = PagedLatents(torch.zeros(S * 6, P, L + R), table, starts, torch.tensor([n for _, n in sequences]).int())
    plans = list[Tensor]()

    def attend(absorbed: Tensor, paged: PagedLatents, plan: Tensor, *others: Any, **constants: Any) -> None:
        plans.append(plan)
        for made in others[:2]:  # parts and their weights
            made.zero_()

    absorb.attend_absorbed(
        attend, rows, up, paged, torch.zeros(T, H, V), 1.0, write=False, queries=2, programs=programs, block_n=tile,
        absorb_m=16, absorb_l=16, values_m=16, values_v=16, values_l=16, values_warps=4, parts_at_once=2,
    )  # fmt: skip
    tiles = [-(-length // tile) if 0 < n <= 2 else 0 for n, length in sequences]
    before = [0, *accumulate(tiles)]
    records, found = plans[0][: programs * 8].view(programs, 8).tolist(), plans[0][programs * 8 :].tolist()
    assert found == before
    busy = [r for r in records if r[0] < r[1]]
    assert len(busy) == min(programs, sum(tiles))
    assert [r[0] for r in busy] == [0, *(r[1] for r in busy)][: len(busy)]
    assert not busy or busy[-1][1] == sum(tiles)
    assert max((r[1] - r[0] for r in busy), default=0) - min((r[1] - r[0] for r in busy), default=0) <= 1
    for first, _, s, *of_sequence, block in busy:
        assert of_sequence == [before[s], before[s + 1], *sequences[s]]
        assert before[s] <= first < before[s + 1]
        assert block == table[s, (first - before[s]) * tile // P]
