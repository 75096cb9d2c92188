"""selective_scan beside transformers' own loop, in steps of any size, and its C++ kernel at every instruction level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from graphllm.ir.kernels import c_kernel
from graphllm.ir.testing.check import cases_of, check_impl
from graphllm.ops.recurrent.selective_scan import selective_scan
from tests.ops.implementations import implementation
from tests.ops.levels import level_of
from tests.ops.packed import packed

KERNELS = [c_kernel(f"graphllm_selective_scan_{t}") for t in ("f32", "bf16")]
SMALL = [c for c in cases_of(selective_scan) if c.size == "small"]
cpu_scan = implementation(selective_scan, "cpu")


level = level_of(KERNELS)


def _drawn(T: int, D: int, N: int) -> dict[str, Tensor]:
    torch.manual_seed(T)
    return {
        "x_TD": torch.randn(T, D), "dt_TD": torch.randn(T, D), "A_DN": -torch.rand(D, N) * 4, "B_TN": torch.randn(T, N),
        "C_TN": torch.randn(T, N), "D_D": torch.randn(D), "dt_bias_D": torch.randn(D) - 2,
    }  # fmt: skip


def _theirs(a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """y [T, D] and the state [D, N] after it, of a sequence that begins with a state of zeros."""
    rows = {n: a[n].T[None] for n in ("x_TD", "dt_TD", "B_TN", "C_TN")}
    y, state = mamba_selective_scan(
        rows["x_TD"], rows["dt_TD"], a["A_DN"], rows["B_TN"], rows["C_TN"], D=a["D_D"], delta_bias=a["dt_bias_D"],
        delta_softplus=True, return_last_state=True,
    )  # fmt: skip
    return y[0].T, state[0]


@pytest.mark.parametrize("scan", [selective_scan, cpu_scan], ids=["reference", "cpu"])
@pytest.mark.parametrize(("T", "D", "N"), [(1, 24, 16), (90, 40, 16), (33, 19, 24)])
def test_transformers(scan: Callable[..., Tensor], T: int, D: int, N: int) -> None:
    a, state = _drawn(T, D, N), torch.zeros(2, 1, D, N)
    y, last = _theirs(a)
    torch.testing.assert_close(scan(**a, state=state, at=packed([T], [0], [0])), y, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state[0, 0], last, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunks", [[130], [1] * 130, [64, 65, 1], [3, 1, 126]], ids=str)
def test_steps_of_any_size_give_the_same(chunks: list[int]) -> None:
    """To the bit: the kernel adds in one order, wherever a step ends."""
    a, whole, state = _drawn(130, 40, 16), torch.zeros(2, 1, 40, 16), torch.zeros(2, 1, 40, 16)
    expected = cpu_scan(**a, state=whole, at=packed([130], [0], [0]))
    found = []
    for i, count in enumerate(chunks):
        rows = slice(sum(chunks[:i]), sum(chunks[:i]) + count)
        step = {n: t[rows] if "_T" in n else t for n, t in a.items()}
        found.append(cpu_scan(**step, state=state, at=packed([count], [0], [0])))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(state[0], whole[0])


@pytest.mark.parametrize("scan", [selective_scan, cpu_scan], ids=["reference", "cpu"])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_rejected_drafts_are_undone(scan: Callable[..., Tensor], accepted: int) -> None:
    """Of three drafted tokens some are kept: the next step reads the version of the last of these."""
    a, state, plain = _drawn(8, 24, 16), torch.zeros(3, 3, 24, 16), torch.zeros(2, 1, 24, 16)

    def rows(*numbers: int) -> dict[str, Any]:
        return {n: t[list(numbers)] if "_T" in n else t for n, t in a.items()}

    scan(**rows(0, 1, 2, 3), state=state, at=packed([4], [1], [0]))
    scan(**rows(4, 5, 6), state=state, at=packed([3], [1], [2]))
    found = scan(**rows(7), state=state, at=packed([1], [1], [accepted - 1]))
    kept = (0, 1, 2, 3, *(4, 5, 6)[:accepted], 7)
    expected = scan(**rows(*kept), state=plain, at=packed([len(kept)], [0], [0]))
    torch.testing.assert_close(found, expected[-1:], atol=1e-5, rtol=1e-5)
    assert not state[[0, 2]].any()


def test_levels(level: str, threads: int) -> None:
    results = check_impl(selective_scan, selective_scan.impls["cpu"], SMALL)
    assert len(results) >= 2 * len(SMALL)
    assert [str(r) for r in results if not r.ok] == []


@pytest.mark.parametrize(("T", "S"), [(1, 1), (6, 6), (50, 3), (2, 4)])
def test_it_is_tuned_on_all_rows_of_states_that_exist(T: int, S: int) -> None:
    """In mixed steps a bucket has fewer tokens than sequences, too."""
    given = {"state": torch.zeros(S + 1, 1, 24, 16), "at": packed([0] * S, [0] * S, [0] * S), **_drawn(T, 24, 16)}
    made = selective_scan.with_tuning_inputs(selective_scan.bind((), given))
    assert made["query_start_loc"].diff().ge(0).all()
    assert made["query_start_loc"][-1] == T
    assert sorted(made["slots"].tolist()) == list(range(S))
    assert cpu_scan(**made).isfinite().all()
    assert bool(made["state"][:-1].flatten(1).any(1).sum() == min(S, T))
