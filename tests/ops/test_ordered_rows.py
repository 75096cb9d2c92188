"""Kernels of deterministic mode for a GPU: attention over several ranges, and that all buckets of a weight have launch
constants of one order."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from graphllm.config import Bucket, Target
from graphllm.ir import CallSite, runs_gluon
from graphllm.ir.registry import load_ops
from graphllm.ir.testing.check import relative_error
from tests.tiers import thorough

OPS = load_ops()
TARGET = Target("cuda", ("sm_90", "sms_132"))
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's kernels")


def _attention(tokens: tuple[int, ...], lengths: tuple[int, ...], window: int) -> dict[str, Any]:
    """A step of sequences with these numbers of new tokens and these lengths, in scattered blocks."""
    H, K, E, P, columns = 6, 2, 24, 16, 20
    drawn = torch.Generator().manual_seed(0)
    T, S = sum(tokens), len(tokens)
    q, k, v = (torch.randn(T, heads, E, generator=drawn) for heads in (H, K, K))
    return {
        "q_THE": q, "k_TKE": k, "v_TKE": v, "kv_cache": torch.randn(S * columns, 2, K, P, E, generator=drawn),
        "block_table": torch.randperm(S * columns, generator=drawn).int().view(S, columns),
        "query_start_loc": torch.tensor([0, *tokens]).cumsum(0).int(), "seq_lens": torch.tensor(lengths).int(),
        "scale": E**-0.5, "window": window, "sinks_H": torch.randn(H, generator=drawn),
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it on a GPU")
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize(
    ("tokens", "programs"), [((1, 0, 1), 1), ((1, 1, 1), 3), thorough((70, 1, 3), 1, id="prompts")]
)
def test_ranges_are_joined(tokens: tuple[int, ...], programs: int, window: int) -> None:
    op = OPS["paged_attention"]
    args = {n: v.half() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for n, v in _attention(tokens, (300, 150, 64), window).items()}  # fmt: skip
    args = op.bind((), args)
    exact = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in args.items()}
    expected = op.reference(**exact)
    single = max(tokens) == 1
    found = op.impls["triton_ranges"].fn(
        **args, block_m=16, block_n=32, warps=4, stages=2, length=64, parts=5, programs=programs, single=int(single)
    )
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize("op", ["fused_linear", "linear_add_norm"])
@pytest.mark.parametrize("inner", [64, 896, 1024, 4864, 14336])
@pytest.mark.parametrize("width", [64, 1000, 4096, 28672, 151936])
def test_all_buckets_have_launch_constants_of_one_order(op: str, width: int, inner: int) -> None:
    orders = set()
    many = (300, 8192) if runs_gluon(TARGET) else ()  # what serves them is not interpreted
    for rows in (1, 2, 16, 40, 64, 100, 256, *many):
        given: dict[str, Any] = {"x_TI": torch.empty(rows, inner, dtype=torch.bfloat16, device="meta")}
        given["weight_OI"] = given["x_TI"].new_empty((width, inner))
        if op == "linear_add_norm":
            out = given["x_TI"].new_empty((rows, width))
            given |= {"residual_TO": out, "norm_O": out[0], "eps": 1e-5}
        site = CallSite(OPS[op].bind((), given), TARGET, Bucket("mixed", 2, rows), deterministic=True)
        impls = [i for i in OPS[op].impls.values() if i.device == "cuda" and i.supports(site)]
        named = {i.row_order(site, constants) for i in impls for constants in i.configs(site)} - {""}
        assert named, rows
        orders |= named
    assert len(orders) == 1
