"""Sparse attention: what index_topk chooses, beside a plain loop; what is seen of it; CPU kernels at every instruction
level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm.ir.kernels import c_kernel
from graphllm.ir.testing import Maker
from graphllm.ir.testing.check import cases_of, check_impl
from graphllm.ops.attention.index_topk import index_topk
from graphllm.ops.attention.latent_attention import latent_attention
from graphllm.ops.attention.ragged_cases import Sequences, ragged_batch
from graphllm.ops.attention.sparse_latent_attention import sparse_latent_attention
from tests.ops.implementations import implementation
from tests.ops.levels import level_of

P, E, H = 16, 8, 3
SIZES = (3, 24, 6, 36, 20)  # heads, N, R, L, V
NAN = float("nan")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2}
NAMES = ("reference", "cpu")
CHOOSE = (index_topk, implementation(index_topk, "cpu"))
DTYPES = ("f32", "bf16")
KERNELS = [
    *(c_kernel(f"graphllm_index_topk_{dtype}") for dtype in DTYPES),
    *(c_kernel(f"graphllm_sparse_latent_attention_{dtype}{c}") for dtype in DTYPES for c in ("", "_e4m3", "_int8")),
]
ATTEND = (sparse_latent_attention, implementation(sparse_latent_attention, "cpu"))

level = level_of(KERNELS)


def _maker(seed: int) -> Maker:
    return Maker(torch.Generator().manual_seed(seed), torch.device("cpu"), torch.float32)


def _index(sequences: Sequences, topk: int, seed: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Arguments over a cache that is NaN where nobody has written, and what is to be chosen for each token."""
    make = _maker(seed)
    total, where = ragged_batch(make, sequences, P)
    cache = torch.full((total, P, E), NAN)
    T = sum(n for n, _ in sequences)
    q, k = (make.integers(-2, 3, *shape, dtype=torch.float32) for shape in ((T, H, E), (T, E)))
    weights = make.integers(-1, 3, T, H, dtype=torch.float32)
    expected, t = [], 0
    for row, (n, length) in zip(where["block_table"].tolist(), sequences, strict=True):
        keys = make.integers(-2, 3, length, E, dtype=torch.float32)
        keys[length - n :] = k[t : t + n]
        for position in range(length - n):
            cache[row[position // P], position % P] = keys[position]
        for position in range(length - n, length):
            scores = [
                sum(float(weights[t, h]) * max(float(q[t, h] @ keys[i]), 0.0) for h in range(H))
                for i in range(position + 1)
            ]
            best = sorted(range(position + 1), key=lambda i: (-scores[i], i))[:topk]
            expected.append(sorted(best) + [-1] * (topk - len(best)))
            t += 1
    given_ = {"index_q_THE": q, "index_k_TE": k, "index_weights_TH": weights, "index_cache": cache, **where}
    return given_ | {"topk": topk}, expected


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 60)).map(lambda s: (s[0], s[0] + s[1])), min_size=1, max_size=4
)


@pytest.mark.parametrize("choose", CHOOSE, ids=NAMES)
@settings(max_examples=25, deadline=None)
@given(sequences=SEQUENCES, topk=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_best_are_chosen(choose: Any, sequences: Sequences, topk: int, seed: int) -> None:
    args, expected = _index(sequences, topk, seed)
    assert choose(**args).tolist() == expected


def _latent(sequences: Sequences, topk: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments over a cache that is NaN where nobody has written, with some positions of each token chosen."""
    (heads, N, R, L, V), make = SIZES, _maker(5)
    total, where = ragged_batch(make, sequences, P)
    cache = torch.full((total, P, L + R), NAN, dtype=dtype)
    chosen = []
    for row, (n, length) in zip(where["block_table"].tolist(), sequences, strict=True):
        for position in range(length - n):
            cache[row[position // P], position % P] = make.normal(L + R).to(dtype)
        for position in range(length - n, length):
            some = torch.randperm(position + 1, generator=make.generator)[:topk].sort().values.tolist()
            chosen.append(some + [-1] * (topk - len(some)))
    T = len(chosen)
    shapes = {"q_nope_THN": (T, heads, N), "q_rope_THR": (T, heads, R), "latent_TL": (T, L), "k_rope_TR": (T, R)}
    return {name: make.normal(*shape).to(dtype) for name, shape in shapes.items()} | where | {
        "k_up_HNL": make.normal(heads, N, L, scale=L**-0.5).to(dtype),
        "v_up_HVL": make.normal(heads, V, L, scale=L**-0.5).to(dtype),
        "latent_cache": cache, "scale": (N + R) ** -0.5, "chosen_TK": torch.tensor(chosen, dtype=torch.int32),
    }  # fmt: skip


def _copy(args: dict[str, Any]) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attend", ATTEND, ids=NAMES)
def test_chosen_tokens_are_seen_and_no_others(attend: Any, dtype: torch.dtype) -> None:
    """Beside a softmax over rows that are taken out one by one."""
    sequences = [(1, 100), (4, 70), (0, 0), (37, 70), (66, 66), (1, 1)]
    args = _latent(sequences, 20, dtype)
    found = attend(**_copy(args)).double()
    dense = {n: v for n, v in _copy(args).items() if n != "chosen_TK"}
    latent_attention(**dense)  # writes the step's tokens
    L, first = SIZES[3], 0
    k_up, v_up = args["k_up_HNL"].double(), args["v_up_HVL"].double()
    for row, (n, _) in zip(args["block_table"].tolist(), sequences, strict=True):
        for t in range(first, first + n):
            positions = [p for p in args["chosen_TK"][t].tolist() if p >= 0]
            rows = torch.stack([dense["latent_cache"][row[p // P], p % P].double() for p in positions])
            keys = torch.einsum("nl,hkl->hnk", rows[:, :L], k_up)
            logits = torch.einsum("hk,hnk->hn", args["q_nope_THN"][t].double(), keys)
            logits += torch.einsum("hr,nr->hn", args["q_rope_THR"][t].double(), rows[:, L:])
            values = torch.einsum("nl,hvl->hnv", rows[:, :L], v_up)
            expected = torch.einsum("hn,hnv->hv", torch.softmax(logits * args["scale"], -1), values)
            assert (found[t] - expected).norm() <= TOLERANCE[dtype] * expected.norm()
        first += n


@pytest.mark.parametrize("attend", ATTEND, ids=NAMES)
def test_of_all_tokens_it_is_dense_attention(attend: Any) -> None:
    args = _latent([(1, 100), (4, 70), (37, 70), (66, 66)], 100, torch.float32)
    dense = latent_attention(**{n: v for n, v in _copy(args).items() if n != "chosen_TK"})
    torch.testing.assert_close(attend(**_copy(args)), dense, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("op", [index_topk, sparse_latent_attention], ids=lambda op: op.name)
def test_cases_on_a_cpu(level: str, op: Any) -> None:
    small = [case for case in cases_of(op) if case.size == "small"]
    results = check_impl(op, op.impls["cpu"], small)
    assert len(results) >= 2 * len(small)
    assert [str(r) for r in results if not r.ok] == []
