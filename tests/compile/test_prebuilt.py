"""Pieces of prebuilt kernels against torch: each kind of loop, in rows of one and of many, and random expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from graphllm.compile.codegen.objects import Objects
from graphllm.compile.codegen.prebuilt.backend import Prebuilt
from graphllm.config import Bucket
from graphllm.ir.graph import TensorSpec
from tests.compile import graphs
from tests.compile.test_translate import BUCKETS, GRAPHS
from tests.tiers import draws

dense = TensorSpec.contiguous


def _rotated(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Half of each head, the rest as it is."""
    q = v["q"].view(-1, 3, 16)
    cos, sin = v["x"][:, :4].cos().unsqueeze(1), v["x"][:, :4].sin().unsqueeze(1)
    first, second = q[:, :, :4], q[:, :, 4:8]
    return (torch.cat([first * cos - second * sin, second * cos + first * sin, q[:, :, 8:]], -1), cos)


def _normed(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x = functional.layer_norm(v["x"], [8], v["w"], v["w"] * 0.5, 1e-5)
    again = x + v["x"]
    return again, again * torch.rsqrt(again.pow(2).mean(-1, keepdim=True) + 1e-6) * v["w"]


def _functions(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x, tiny = v["x"] * 4, v["x"] * 1e-4
    return (
        functional.silu(x), functional.gelu(x), functional.gelu(x, approximate="tanh"), functional.softplus(x),
        x.tanh(), tiny.tanh(), x.sigmoid(), x.erf(), tiny.erf(), x.exp(), x.exp2(), x.expm1(), tiny.expm1(),
        (x * x).log(), (x * x).log1p(), (tiny * tiny).log1p(), x.abs().sqrt(), (x * 99).sin(), (x * 99).cos(),
        x.floor(), x.ceil(), x.round(), x.trunc(), x.reciprocal(), x.clamp(-1, 2), x.relu(), x.abs().pow(1.7), x.pow(3),
    )  # fmt: skip


def _edges(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Infinity, NaN and 0."""
    x = torch.where(v["x"] > 1, float("inf"), torch.where(v["x"] < -1, float("-inf"), v["x"] * 0))
    nan = x - x
    return (
        x.exp(), x.tanh(), x.sigmoid(), x.erf(), x.abs().log(), nan.exp(), nan.tanh(), nan.isnan(), x.isinf(),
        x.amax(-1), torch.maximum(nan, v["x"]), v["x"].masked_fill(v["x"] > 0, float("-inf")).softmax(-1),
    )  # fmt: skip


def _integers(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    i = v["i"] - 3
    j = torch.arange(v["x"].shape[0], dtype=torch.int32)
    return (
        i // 2, i % 3, i * j, i.clamp_min(0), (i > 0) & (j < 4), (i > 0) | ~(j < 4), i.float() * 0.5, i.abs(), -i,
        torch.where(i < 0, j, i), i.sum(), (i > 0).any(), (i < 99).all(), i << 2, i >> 1, i.to(torch.int64) * 2**40, j,
    )  # fmt: skip


def _taken(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x, i = v["x"], v["i"]
    rows = functional.embedding(i, x * 2)
    return (
        rows, x[i], rows[i] + x, x.gather(1, (i % 8).long().unsqueeze(1)), x[i.long(), (i % 8).long()],
        x.t()[:, i.long()], i[i.long()] * 2, (x + 1).index_select(1, v["few"].long() % 8), x[(i - i.shape[0]).long()],
    )  # fmt: skip


def _sums(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x = v["q"].view(-1, 3, 16)
    return (
        x.sum(0), x.sum(1), x.mean(-1), x.amax(1, keepdim=True) - x, x.amin(-1, keepdim=True), x.var(-1, keepdim=True),
        x.softmax(-1), x.log_softmax(-1), x.max(-1)[0], x.max(-1)[1], x.argmax(-1), x.sum(-1).sum(-1), x.mean((1, 2)),
        v["x"].argmin(0), v["x"].min(0)[0],
    )  # fmt: skip


def _best(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    values, order = torch.topk(v["q"].softmax(-1), 3, dim=-1)
    first = v["q"].argmax(-1, keepdim=True)
    rest = v["q"].scatter(-1, first, float("-inf"))
    return values / values.sum(-1, keepdim=True), order.int(), rest.softmax(-1), torch.stack([v["x"], v["x"] * 2], 1)


def _narrow(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """16 bits: each result is rounded once."""
    b, h = v["b"], v["h"]
    return (
        b * 2 + 1,
        (b.float() * b.float().pow(2).mean(-1, keepdim=True)).bfloat16(),
        h * 3,
        h.float() + b,
        b.to(torch.int8),
    )


def _views(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x = v["x"] + 1
    turned = x.t().contiguous()
    return (
        turned, x.view(-1, 2, 4).transpose(1, 2) * 2, x[:, ::2] - x[:, 1::2], x.unsqueeze(1).expand(-1, 3, -1) + v["w"],
        torch.cat([x, x[:, :3], v["x"]], 1), torch.cat([x, x * 2], 0), x.flip(0), x.cumsum(1),
        torch.zeros_like(x), torch.full((3,), 2.5) + x[:, :3],
    )  # fmt: skip


def _empty(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Rows of nothing, beside and before rows of one number."""
    x = v["x"]
    more, twice = torch.arange(8, 9).expand(x.shape[0], -1), x[:, :1] * 2
    return torch.cat([x[:, :2] + 1, twice, x.new_ones(x.shape[0], 0)], 1), torch.cat([x[:, :2].long(), more], 1)


def _wide(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Rows longer than a block, with and without a sum."""
    logits = v["x"] @ v["table"]
    return torch.tanh(logits / 3) * 3, logits.softmax(-1), logits.argmax(-1)


LOOPS: dict[str, tuple[graphs.Function, dict[str, TensorSpec]]] = {
    **{name: GRAPHS[name] for name in GRAPHS if name != "table"},
    "rotated": (_rotated, {"q": dense("float32", "T", 48)}),
    "normed": (_normed, {"w": dense("float32", 8)}),
    "functions": (_functions, {}),
    "edges": (_edges, {}),
    "empty": (_empty, {}),
    "integers": (_integers, {"i": dense("int32", "T")}),
    "taken": (_taken, {"i": dense("int32", "T"), "few": dense("int64", 3)}),
    "sums": (_sums, {"q": dense("float32", "T", 48)}),
    "best": (_best, {"q": dense("float32", "T", 12)}),
    "narrow": (_narrow, {"b": dense("bfloat16", "T", 8), "h": dense("float16", "T", 8)}),
    "views": (_views, {"w": dense("float32", 3, 8)}),
    "wide": (_wide, {"table": dense("float32", 8, 5000)}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Objects() as objects:
        return graphs.build(Prebuilt(objects), LOOPS, BUCKETS, tmp_path_factory.mktemp("pieces"))


@pytest.mark.parametrize(("T", "S"), [(1, 1), (2, 2), (7, 3), (33, 5)])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_compute_what_torch_does(name: str, T: int, S: int, built: Any) -> None:
    pieces, libraries = built
    fn, extra = LOOPS[name]
    bucket: Bucket = BUCKETS[1] if T == 1 else BUCKETS[0]
    given = graphs.inputs(extra, T, S)
    want = fn(given)
    for number, (found, expected) in enumerate(
        zip(graphs.run(pieces[name, bucket], bucket, given, len(want), S, libraries), want, strict=True)
    ):
        assert found.dtype == expected.dtype
        narrow = found.dtype in (torch.bfloat16, torch.float16)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if narrow else {"rtol": 3e-6, "atol": 3e-6}
        torch.testing.assert_close(
            found, expected, equal_nan=True, **tolerance, msg=lambda text, n=number: f"output {n}: {text}"
        )


TORCH = {"sort", "slices", "constants", "matmuls", "casts", "sums", "views", "wide"}  # products, sorts and the like


@pytest.mark.parametrize("name", sorted(LOOPS.keys() - TORCH))
def test_nothing_is_left_to_torch(name: str, built: Any) -> None:
    """So an engine on a CPU need not import it."""
    pieces, _ = built
    kinds = {i[0] for bucket in BUCKETS for i in pieces[name, bucket].bundle["code"]}
    assert kinds <= {"empty", "view", "kernel", "zeroed"}


@st.composite
def expressions(draw: st.DrawFn) -> tuple[str, ...]:
    """Steps, each a name and the numbers of earlier results."""
    steps = []
    for count in range(3, 3 + draw(st.integers(2, 14))):
        a, b = (draw(st.integers(0, count - 1)) for _ in range(2))
        steps.append(f"{draw(st.sampled_from(sorted(STEPS)))} {a} {b}")
    return tuple(steps)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: (a * b).tanh(),
    "choose": lambda a, b: torch.where(a > b, a, b * 0.5),
    "mean": lambda a, b: a.mean(-1, keepdim=True) + b,
    "column": lambda a, b: a.amax(0) - b,
    "halves": lambda a, b: torch.cat([a[:, 4:], b[:, :4]], 1),
    "turned": lambda a, b: a.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8) - b,
    "softmax": lambda a, b: a.softmax(-1) + b,
    "rows": lambda a, b: a[(b[:, 0].abs() * 1000).long() % 2 * -1] + b,
    "narrow": lambda a, b: (a * 3).bfloat16().float() + b,
}


def _evaluated(steps: Sequence[str], v: dict[str, Tensor]) -> tuple[Tensor, ...]:
    found = [v["x"], v["y"], v["x"] - v["y"]]
    for step in steps:
        name, a, b = step.split()
        found.append(STEPS[name](found[int(a)], found[int(b)]))
    return tuple(found[3:][-4:])


@settings(max_examples=draws(12, 200), deadline=None)
@given(steps=expressions(), T=st.sampled_from([1, 2, 5, 40]))
def test_any_expression(steps: tuple[str, ...], T: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    bucket = BUCKETS[1] if T == 1 else Bucket("mixed", 2, 64)
    extra = {"y": dense("float32", "T", 8)}
    it = {"it": (lambda v: _evaluated(steps, v), extra)}
    with Objects() as objects:
        made, libraries = graphs.build(Prebuilt(objects), it, (bucket,), tmp_path_factory.mktemp("pieces"))
    used = graphs.inputs(extra, T, 1)
    want = _evaluated(steps, used)
    for found, expected in zip(
        graphs.run(made["it", bucket], bucket, used, len(want), 1, libraries), want, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
