"""LOWER: which implementation an op gets at a site, and that the graph below holds no op of ours."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from graphllm.compile.codegen.lower import lower
from graphllm.compile.pieces import require_implementations
from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, ConfigError, Target
from graphllm.ir import CallSite, Cost, Op
from graphllm.ir.graph import GraphError, Shapes, TensorSpec
from graphllm.ir.graph_form import to_json
from graphllm.ir.registry import load_ops
from graphllm.rewrite import choose

OPS = load_ops()
REGISTRY = sys.modules["graphllm.ir.op"]._ops  # `graphllm.ir.op` is also the name of the decorator
CPU, GPU = Target("cpu", ("x86_64",)), Target("cuda", ("sm_90",))
SMALL, LARGE = Bucket("decode", 2, 8), Bucket("mixed", 2, 512)
SPEC = TensorSpec.contiguous("float32", "T", 16)


def _negate(x: Tensor) -> Tensor:
    """-x"""
    return -x


@pytest.fixture(scope="module")
def op() -> Op:
    """An op with three implementations: for few tokens, for any, and for a GPU."""
    made = Op("lower_test_negate", _negate, False, (), False, lambda x: Cost(1, 1))
    made.impl("few", device="cpu", supports=lambda site: site.bucket.hi <= 8)(lambda x: x.cos().mul(0) - x)
    made.impl("wide", device="cpu", supports=lambda site: site.args["x"].shape[-1] >= 16)(lambda x: x.tan().mul(0) - x)
    made.impl("gpu", device="cuda")(lambda x: -x)
    return made


def _site(target: Target, bucket: Bucket, width: int = 16) -> CallSite:
    return CallSite({"x": torch.empty(2, width)}, target, bucket)


def test_first_registered_that_supports_the_site(op: Op) -> None:
    def name(site: CallSite) -> str | None:
        chosen = choose(op, site)
        return chosen and chosen.impl

    assert name(_site(CPU, SMALL)) == "few"
    assert name(_site(CPU, LARGE)) == "wide"
    assert name(_site(CPU, LARGE, width=4)) is None
    assert name(_site(GPU, SMALL)) == "gpu"


def test_names_of_implementations_are_unique(op: Op) -> None:
    with pytest.raises(ValueError, match="already has an implementation named 'few'"):
        op.impl("few", device="cpu")(lambda x: x)


@pytest.mark.parametrize(("bucket", "used"), [(SMALL, "aten::cos"), (LARGE, "aten::tan")])
def test_body_of_the_chosen_implementation_is_inlined(
    op: Op, bucket: Bucket, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, op.name, op)
    unit = trace_unit("test", {"x": SPEC}, lambda v: (OPS["swiglu"](op(v["x"])),), Shapes("cpu"))
    lowered = lower(unit.graph, [SPEC], CompileConfig(CPU), bucket)
    assert lowered.chosen == (f"{op.name}: {'few' if bucket is SMALL else 'wide'}", "swiglu: reference")
    calls = [n.target for n in lowered.graph.graph.nodes if n.op == "call_function"]
    names = [t.name() for t in calls if isinstance(t, torch._ops.OpOverload)]
    assert not any(n.startswith("graphllm::") for n in names)
    assert [n for n in ("aten::cos", "aten::tan") if n in names] == [used]
    x = torch.randint(-9, 9, (5, 16)).float()
    torch.testing.assert_close(lowered.graph(x)[0], OPS["swiglu"](-x))


def test_static_bucket_has_no_symbols() -> None:
    unit = trace_unit("test", {"x": SPEC}, lambda v: (v["x"].sum(0),), Shapes("cpu"))
    one = lower(unit.graph, [SPEC], CompileConfig(CPU), Bucket("decode", 1, 1))
    assert list(one.inputs[0].shape) == [1, 16]
    many = lower(unit.graph, [SPEC], CompileConfig(CPU), SMALL)
    assert isinstance(many.inputs[0].shape[0], torch.SymInt)


def test_a_boundary_op_without_an_implementation_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    boundary = Op("lower_test_boundary", _negate, True, (), False, lambda x: Cost(1, 1))
    monkeypatch.setitem(REGISTRY, boundary.name, boundary)
    unit = trace_unit("test", {"x": SPEC}, lambda v: (boundary(v["x"]),), Shapes("cpu"))
    lowered = lower(unit.graph, [SPEC], CompileConfig(CPU), SMALL)
    assert lowered.chosen == ("lower_test_boundary: reference",)
    assert torch.equal(lowered.graph(torch.ones(3, 16))[0], -torch.ones(3, 16))


def test_what_nothing_can_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that looks at data cannot be compiled: without an implementation that is an error with a remedy,
    told before anything is compiled, and never a reason to interpret."""

    def by_value(x: Tensor, width: int) -> Tensor:
        """x or -x, by its first number."""
        return x if x[0, 0].item() > 0 else -x

    made = Op("lower_test_by_value", by_value, True, (), False, lambda x: Cost(1, 1))
    made.fake(lambda x: torch.empty_like(x))
    monkeypatch.setitem(REGISTRY, made.name, made)
    unit = trace_unit("test", {"x": SPEC}, lambda v: (made(v["x"], 5),), Shapes("cpu"))
    output = unit.graph.output_node()
    output.meta["val"] = tuple(n.meta["val"] for n in output.args[0])
    piece = to_json(unit.graph, unit.shapes)
    small, both = CompileConfig(CPU, buckets=(SMALL,)), CompileConfig(CPU, buckets=(SMALL, LARGE))
    with pytest.raises(ConfigError, match=r"op lower_test_by_value: no implementation for cpu .* the backend eager"):
        require_implementations([(piece, SMALL)], small)
    made.impl(
        "few", device="cpu", supports=lambda site: site.rows("x") <= 8,
        remedy=lambda site: f"width {site.args['width']}: use 4",
    )(lambda x: 0 - x)  # fmt: skip
    require_implementations([(piece, SMALL)], small)
    for check in (
        lambda: require_implementations([(piece, SMALL), (piece, LARGE)], both),
        lambda: lower(unit.graph, [SPEC], both, LARGE),
    ):
        with pytest.raises(ConfigError, match=r"op lower_test_by_value: .* cannot be compiled. width 5: use 4"):
            check()


def _turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """x twice, of which the second lies column by column."""
    return x * 2, (x.t().contiguous() * 3).t()


def test_results_lie_as_those_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next piece is compiled for the body's strides: an implementation with others is copied, and one whose results
    have another shape or type is refused."""
    made = Op("lower_test_turned", _turned, True, (), False, lambda x: Cost(1, 1))
    made.impl("rows", device="cpu", supports=lambda site: site.bucket.hi <= 8)(lambda x: ((x.t() * 2).t(), x * 3))
    made.impl("other", device="cpu")(lambda x: (x * 2, x[:, :3] * 3))
    monkeypatch.setitem(REGISTRY, made.name, made)
    unit = trace_unit("test", {"x": SPEC}, lambda v: made(v["x"]), Shapes("cpu"))
    lowered = lower(unit.graph, [SPEC], CompileConfig(CPU), SMALL)
    assert lowered.chosen == ("lower_test_turned: rows",)
    x = torch.randn(5, 16)
    for found, wanted in zip(lowered.graph(x), _turned(x), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
    with pytest.raises(GraphError, match=r"lower_test_turned: the implementation other returns float32\[T, 3\], the"):
        lower(unit.graph, [SPEC], CompileConfig(CPU), LARGE)
