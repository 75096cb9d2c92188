"""Triton kernels on a real GPU: every small case natively, CUDA-graph replay with other data, full-size shapes."""

from __future__ import annotations

import pytest
import torch

from graphllm.config import Bucket
from graphllm.host.machine import detect_target
from graphllm.ir.op import CallSite, Op
from graphllm.ir.registry import load_ops
from graphllm.ir.testing import Case, Maker
from graphllm.ir.testing.check import cases_of, check_impl, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

_OPS = load_ops()
_IMPLS = [(op.name, impl.name) for op in _OPS.values() for impl in op.impls.values() if impl.device == "cuda"]
_SMALL = [(o, i, c.name) for o, i in _IMPLS for c in cases_of(_OPS[o]) if c.size == "small"]


def _case(op: Op, name: str) -> Case:
    return next(c for c in cases_of(op) if c.name == name)


def _inputs(op: Op, case: Case, seed: int) -> dict[str, object]:
    maker = Maker(torch.Generator("cuda").manual_seed(seed), torch.device("cuda"), torch.bfloat16)
    return op.bind((), case.inputs(maker))


def _error(op: Op, case: Case, found: torch.Tensor, args: dict[str, object]) -> float:
    exact = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.itemsize > 1 else v
        for k, v in args.items()
    }
    return relative_error(case.specified(found, args), case.specified(op.reference(**exact), exact))


@pytest.mark.parametrize(("name", "impl", "case"), _SMALL)
def test_small_case(name: str, impl: str, case: str) -> None:
    op = _OPS[name]
    results = check_impl(op, op.impls[impl], [_case(op, case)], real=False)
    assert not [str(r) for r in results if not r.ok]


def test_decode_graph_serves_other_lengths() -> None:
    """One captured launch, replayed after lengths, pages and padding changed, gives the new batch's result."""
    op = _OPS["paged_attention"]
    long, ragged = _case(op, "decode_ragged"), _case(op, "decode_empty")
    static = _inputs(op, long, 0)
    columns = static["block_table"].shape[1]
    graph = torch.cuda.CUDAGraph()
    impl = op.impls["triton_decode"]
    decode = impl.at(CallSite(static, detect_target("cuda"), long.bucket))
    decode(**static)
    with torch.cuda.graph(graph):
        out = decode(**static)
    other = _inputs(op, ragged, 1)
    n, pages = len(other["seq_lens"]), other["kv_cache"].shape[0]
    static["kv_cache"][:pages] = other["kv_cache"]
    static["block_table"].zero_()[:n, : other["block_table"].shape[1]] = other["block_table"][:, :columns]
    static["query_start_loc"][: n + 1] = other["query_start_loc"]
    static["query_start_loc"][n + 1 :] = other["query_start_loc"][-1]
    static["seq_lens"].zero_()[:n] = other["seq_lens"]
    rows = int(other["query_start_loc"][-1])
    for tensor in ("q_THE", "k_TKE", "v_TKE"):
        static[tensor][:rows] = other[tensor][:rows]
    graph.replay()
    assert _error(op, ragged, out[:rows], other) < long.tolerance["bfloat16"]


@pytest.mark.parametrize("case", ["decode_8b_b32_ctx512", "decode_8b_b128_uneven", "prefill_8b_1x8192"])
@pytest.mark.slow
def test_full_size_attention(case: str) -> None:
    op = _OPS["paged_attention"]
    full = _case(op, case)
    args = _inputs(op, full, 0)
    site = CallSite(args, detect_target("cuda"), full.bucket)
    impls = [i for i in op.impls.values() if i.device == "cuda" and i.supports(site)]
    assert impls
    for impl in impls:
        assert _error(op, full, impl.at(site)(**_inputs(op, full, 0)), args) < full.tolerance["bfloat16"], impl.name


@pytest.mark.slow
def test_full_size_sample() -> None:
    op = _OPS["sample"]
    for case in (c for c in cases_of(op) if c.size == "real"):
        args = _inputs(op, case, 0)
        assert torch.equal(op.impls["triton_sample"].fn(**args), op.reference(**args)), case.name


@pytest.mark.parametrize("pairs", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 384, 400])
def test_experts_have_any_number_of_tokens(pairs: int) -> None:
    """`gluon_sorted` about the ends of its blocks and tiles: one expert has ``pairs`` tokens, the others have none."""
    op, target = _OPS["fused_moe"], detect_target("cuda")
    impl = op.impls["gluon_sorted"]
    T, N, D, F = 400, 4, 128, 192
    drawn = torch.Generator("cuda").manual_seed(pairs)
    maker = Maker(drawn, torch.device("cuda"), torch.bfloat16)
    args = {
        "x_TD": maker.normal(T, D), "gate_up_N2FD": maker.normal(N, 2 * F, D, scale=D**-0.5),
        "down_NDF": maker.normal(N, D, F, scale=F**-0.5), "weights_TA": maker.normal(T, 1, dtype=torch.float32),
        "experts_TA": torch.where(torch.arange(T, device="cuda") < pairs, 2, -1)[:, None].to(torch.int32),
    }  # fmt: skip
    args = op.bind((), args)
    site = CallSite(args, target, Bucket("mixed", T, T))
    if not impl.supports(site):
        pytest.skip("not for this GPU")
    exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}
    wanted = op.reference(**exact)
    for config in impl.configs(site):
        assert relative_error(impl.fn(**args, **config), wanted) < 5e-3
