"""The recurrent ops beside transformers' own functions, in steps of any size, and their C++ kernels at every
instruction level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from graphllm.config import Bucket, Target
from graphllm.ir.kernels import c_kernel
from graphllm.ir.op import CallSite
from graphllm.ir.testing import Maker
from graphllm.ir.testing.check import cases_of, check_impl
from graphllm.ops.recurrent.causal_conv import causal_conv
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.ssd_scan import ssd_scan
from tests.ops.implementations import implementation
from tests.ops.levels import level_of
from tests.ops.packed import packed

OPS = {"causal_conv": causal_conv, "ssd_scan": ssd_scan}
KERNELS = [c_kernel(f"graphllm_{name}_{t}") for name in OPS for t in ("f32", "bf16")]
H, G, P, N, D, W = 4, 2, 24, 40, 40, 4
Run = Callable[[dict[str, Tensor], Tensor, Slots], Tensor]


level = level_of(KERNELS)


def _conv(of: Any) -> Run:
    return lambda a, state, at: of(a["x"], a["weight"], state, at, a["bias"], "silu")


def _scan(of: Any) -> Run:
    return lambda a, state, at: of(
        a["x"], a["dt"], a["A"], a["B"], a["C"], state, at, a["D"], a["dt_bias"], dt_min=0.0, dt_max=0.0
    )


def _drawn(name: str, T: int) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Arguments by name, with rows for tokens where the first dimension is T; a state's shape without slots."""
    torch.manual_seed(T)
    if name == "causal_conv":
        return {"x": torch.randn(T, D), "weight": torch.randn(D, W), "bias": torch.randn(D)}, (W - 1, D)
    shapes = {"x": (T, H, P), "dt": (T, H), "B": (T, G, N), "C": (T, G, N), "D": (H,), "dt_bias": (H,)}
    return {n: torch.randn(shape) for n, shape in shapes.items()} | {"A": -torch.rand(H) * 4}, (H, P, N)


def _theirs(name: str, a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What transformers gives for a sequence that begins with a state of zeros, and the state after it."""
    if name == "causal_conv":
        rows = torch.cat([torch.zeros(W - 1, D), a["x"]])
        return silu(conv1d(rows.T[None], a["weight"][:, None], a["bias"], groups=D))[0].T, rows[-(W - 1) :]
    y, state = mamba2_chunk_scan(
        a["x"][None], a["dt"][None], a["A"], a["B"][None], a["C"][None], 16, D=a["D"], dt_bias=a["dt_bias"],
        dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    return y[0], state[0]


RUNS = {"causal_conv": _conv, "ssd_scan": _scan}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", ["reference", "cpu"])
@pytest.mark.parametrize("T", [1, 2, 33, 90])
def test_transformers(name: str, kind: str, T: int) -> None:
    of = OPS[name] if kind == "reference" else implementation(OPS[name], "cpu")
    a, shape = _drawn(name, T)
    state = torch.zeros(2, 1, *shape)
    y, last = _theirs(name, a)
    torch.testing.assert_close(RUNS[name](of)(a, state, packed([T])), y, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(state[0, 0], last, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("chunks", [[130], [1] * 130, [64, 65, 1], [3, 1, 126], [31, 32, 33, 34]], ids=str)
def test_steps_of_any_size_give_the_same(name: str, chunks: list[int]) -> None:
    """To the bit: the kernel adds in one order, wherever a step ends."""
    run, (a, shape) = RUNS[name](implementation(OPS[name], "cpu")), _drawn(name, 130)
    whole, state = torch.zeros(2, 1, *shape), torch.zeros(2, 1, *shape)
    expected = run(a, whole, packed([130]))
    found = []
    for i, count in enumerate(chunks):
        rows = slice(sum(chunks[:i]), sum(chunks[:i]) + count)
        found.append(run({n: t[rows] if t.shape[0] == 130 else t for n, t in a.items()}, state, packed([count])))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(state[0], whole[0])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_drafts_are_undone_at_each_place(name: str, taken: int) -> None:
    """A step of four tokens with as many versions; the next one goes on after those that were right."""
    run, (a, shape) = RUNS[name](implementation(OPS[name], "cpu")), _drawn(name, 9)
    state, plain = torch.zeros(2, 4, *shape), torch.zeros(2, 1, *shape)

    def rows(*wanted: int) -> dict[str, Tensor]:
        return {n: t[list(wanted)] if t.shape[0] == 9 else t for n, t in a.items()}

    run(rows(0, 1, 2, 3), state, packed([4]))
    found = run(rows(5, 6, 7), state, packed([3], versions=[taken - 1]))
    run(rows(*range(taken)), plain, packed([taken]))
    assert torch.equal(found, run(rows(5, 6, 7), plain, packed([3])))
    assert torch.equal(state[0, 2], plain[0, 0])


@pytest.mark.parametrize("name", OPS)
def test_levels(name: str, level: str, threads: int) -> None:
    small = [case for case in cases_of(OPS[name]) if case.size == "small"]
    results = check_impl(OPS[name], OPS[name].impls["cpu"], small)
    assert len(results) > len(small)  # states of 16 bits are no case of its
    assert [str(r) for r in results if not r.ok] == []


@pytest.mark.parametrize(("tokens", "S"), [(1, 1), (6, 6), (50, 3), (2, 4)])
def test_it_is_tuned_on_all_rows_of_states_that_exist(tokens: int, S: int) -> None:
    """In mixed steps a bucket has fewer tokens than sequences, too."""
    a, shape = _drawn("ssd_scan", tokens)
    suffix = {"x": "x_THP", "dt": "dt_TH", "A": "A_H", "B": "B_TGN", "C": "C_TGN", "D": "D_H", "dt_bias": "dt_bias_H"}
    given = {suffix[n]: t for n, t in a.items()} | {"state": torch.zeros(S + 1, 1, *shape), "at": packed([0] * S)}
    made = ssd_scan.with_tuning_inputs(ssd_scan.bind((), given))
    assert made["query_start_loc"].diff().ge(0).all()
    assert made["query_start_loc"][-1] == tokens
    assert sorted(made["slots"].tolist()) == list(range(S))
    assert ssd_scan(**made).isfinite().all()
    assert int(made["state"][:-1].flatten(1).any(1).sum()) == min(S, tokens)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_deterministic_steps_have_one_kernel(kind: str) -> None:
    """Where tiles begin decides the order of sums, so prompts in chunks would differ from whole ones."""
    pytest.importorskip("triton")
    case = next(c for c in cases_of(ssd_scan) if "2x64x128" in c.name)
    args = case.inputs(Maker(torch.Generator(), torch.device("cpu"), torch.bfloat16))
    H200 = Target("cuda", ("sm_90", "sms_132"), "H200")
    site = CallSite(ssd_scan.bind((), args), H200, Bucket(kind, 64, 64), deterministic=True)
    served = [i for i in ssd_scan.impls.values() if i.device == "cuda" and i.supports(site)]
    assert {i.row_order(site, c) for i in served for c in i.configs(site)} == {"independent"}
    assert [c["most"] for i in served for c in i.configs(site)] == [1 << 30]
