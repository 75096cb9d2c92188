"""Weight expressions: what they mean, that simplifying changes nothing, and that the loader's short ways give what
plain evaluation gives, for any tree, dtype and device."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from graphllm.ops.gemm.quant_linear.op import dequantize
from graphllm.weights.checkpoint.checkpoint import Checkpoint, WeightError
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan import expr as ex
from graphllm.weights.plan.evaluate import evaluate
from graphllm.weights.plan.match import check_checkpoint
from graphllm.weights.plan.plan import Entry, WeightPlan, decoded
from graphllm.weights.plan.simplify import Region, at_rank, region_of, same_encodings, simplify
from tests.tiers import draws
from tests.weights.fakes import small_reads

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


def fetch_from(tensors: dict[str, Tensor]) -> Callable[[Region], Tensor]:
    """Boxes of tensors in memory."""

    def fetch(region: Region) -> Tensor:
        found = tensors[region.read.sources[0]]
        for dim, (start, stop) in enumerate(zip(region.starts, region.stops, strict=True)):
            found = found.narrow(dim, start, (found.shape[dim] if stop is None else stop) - start)
        return found

    return fetch


def plainly(expr: ex.Expr, tensors: dict[str, Tensor]) -> Tensor:
    """What an expression means, by torch on whole tensors, without `evaluate`'s and the loader's ways with slices."""
    match expr:
        case ex.Read():
            return tensors[expr.sources[0]]
        case ex.Values():
            return torch.tensor(expr.values, dtype=torch.float64).view(expr.extents)
        case ex.Slice():
            index = (slice(None),) * expr.dim + (slice(expr.start, expr.stop),)
            return plainly(expr.part, tensors)[index]
        case ex.Concat():
            return torch.cat([plainly(p, tensors) for p in expr.parts], expr.dim)
        case ex.Stack():
            return torch.stack([plainly(p, tensors) for p in expr.parts])
        case ex.Reshape():
            return plainly(expr.part, tensors).reshape(expr.to)
        case ex.Permute():
            return plainly(expr.part, tensors).permute(expr.dims)
        case ex.Repeat():
            part = plainly(expr.part, tensors)
            return part.repeat(*(expr.times if d == expr.dim else 1 for d in range(part.dim())))
        case ex.Pad():
            part = plainly(expr.part, tensors)
            around = [0, 0] * (part.dim() - 1 - expr.dim) + [expr.before, expr.after]
            return torch.nn.functional.pad(part, around, value=expr.value)
        case ex.Cast():
            return plainly(expr.part, tensors).to(getattr(torch, expr.dtype))
        case ex.Each():
            functions = {"-exp": lambda x: -x.exp(), "+1": lambda x: x + 1, "-1": lambda x: x - 1}
            return functions[expr.function](plainly(expr.part, tensors).double()).float()
        case ex.Decode():
            return dequantize(*(plainly(p, tensors) for p in expr.parts), *expr.matrix)
    raise AssertionError(expr)


class _Maker:
    """Draws expressions, and the tensors that they read."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.tensors = draw, dict[str, Tensor]()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        name = f"x{len(self.tensors)}"
        generator = torch.Generator().manual_seed(self.draw(st.integers(0, 99)))
        self.tensors[name] = torch.randint(-50, 50, shape, generator=generator).to(dtype)
        return name

    def expr(self, shape: tuple[int, ...], depth: int) -> ex.Expr:
        """An expression of that shape."""
        draw = self.draw
        kinds = ["read", "any"]
        if depth > 0:
            kinds += ["slice", "slice", "permute", "reshape", "cast", "each", "concat", "repeat", "pad"]
            kinds += ["stack"] if len(shape) > 1 else []
            kinds += ["decode"] if len(shape) == 2 else []
        kind, dim = draw(st.sampled_from(kinds)), draw(st.integers(0, len(shape) - 1))

        def other(extent: int) -> tuple[int, ...]:
            return (*shape[:dim], extent, *shape[dim + 1 :])

        match kind:
            case "slice":
                start, behind = draw(st.integers(0, 5)), draw(st.integers(0, 5))
                inner = self.expr(other(start + shape[dim] + behind), depth - 1)
                return ex.Slice(inner, dim, start, start + shape[dim])
            case "permute":
                dims = tuple(draw(st.permutations(range(len(shape)))))
                inverse = [dims.index(d) for d in range(len(shape))]
                return ex.Permute(self.expr(tuple(shape[d] for d in inverse), depth - 1), dims)
            case "reshape":
                lead = draw(st.sampled_from([n for n in range(1, 9) if math.prod(shape) % n == 0]))
                return ex.Reshape(self.expr((lead, math.prod(shape) // lead), depth - 1), shape)
            case "cast":
                return ex.Cast(self.expr(shape, depth - 1), "bfloat16")
            case "each":
                total = [f for f in ex.FUNCTIONS if f != "log-"]  # that one gives no number of those above 0
                return ex.Each(draw(st.sampled_from(total)), self.expr(shape, depth - 1))
            case "concat" if shape[dim] > 1:
                cut = draw(st.integers(1, shape[dim] - 1))
                return ex.Concat((self.expr(other(cut), depth - 1), self.expr(other(shape[dim] - cut), depth - 1)), dim)
            case "repeat" if shape[dim] % 2 == 0:
                return ex.Repeat(self.expr(other(shape[dim] // 2), depth - 1), dim, 2)
            case "pad" if shape[dim] > 2:
                before = draw(st.integers(0, 2))
                return ex.Pad(self.expr(other(shape[dim] - 2), depth - 1), dim, before, 2 - before, 3.0)
            case "stack":
                return ex.Stack(tuple(self.expr(shape[1:], depth - 1) for _ in range(shape[0])))
            case "decode":
                blocks, groups = -(-shape[0] // 16), -(-shape[1] // 64)
                values = self.tensor((blocks, groups, 16, 16, 4), torch.int8)
                scales = self.tensor((blocks, groups, 16), torch.bfloat16)
                stored = (
                    ex.Read((values,), (blocks, groups, 16, 16, 4), "int8"),
                    ex.Read((scales,), (blocks, groups, 16), "bfloat16"),
                )
                return ex.Decode("int8", stored, (shape[0], shape[1]))
            case "any":
                name = self.tensor(other(shape[dim] + 3), draw(st.sampled_from([*DTYPES.values()])))
                stored_shape = tuple(ex.ANY if d == dim else n for d, n in enumerate(shape))
                return ex.Slice(ex.Read((name,), stored_shape), dim, 1, 1 + shape[dim])
        return ex.Read((self.tensor(shape, draw(st.sampled_from([*DTYPES.values()]))),), shape)


@st.composite
def an_expr(draw: st.DrawFn) -> tuple[ex.Expr, dict[str, Tensor]]:
    maker = _Maker(draw)
    shape = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    return maker.expr(shape, draw(st.integers(0, 4))), maker.tensors


@settings(max_examples=draws(100, 300), deadline=None)
@example(made=(ex.Reshape(ex.Stack((ex.Reshape(ex.Read(("x",), (1, 1)), (1,)),)), (1, 1)), {"x": torch.ones(1, 1)}))
@given(made=an_expr())
def test_simplifying_changes_no_number(made: tuple[ex.Expr, dict[str, Tensor]]) -> None:
    expr, tensors = made
    expected, short = plainly(expr, tensors), simplify(expr)
    assert short.shape == expr.shape == tuple(expected.shape)
    for form in (expr, short):
        assert torch.equal(evaluate(form, fetch_from(tensors)).double(), expected.double()), str(form)
    assert simplify(short) == short


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=draws(100, 300), deadline=None)
@given(made=an_expr(), dtype=st.sampled_from(["bfloat16", "float32", "float64"]))
def test_loading_is_evaluating(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[ex.Expr, dict[str, Tensor]], dtype: str, device: str
) -> None:
    expr, tensors = made
    folder = tmp_path_factory.getbasetemp()
    save_file(tensors, folder / "model.safetensors")
    plan = WeightPlan.from_json(WeightPlan((Entry("w", expr.shape, dtype, expr),)).to_json())
    with small_reads():
        found = load_weights(plan, Checkpoint.open(folder), device)["w"]
    assert found.dtype == getattr(torch, dtype)
    assert found.is_contiguous()
    assert torch.equal(found.cpu(), plainly(expr, tensors).to(found.dtype)), str(expr)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (
            ex.Slice(ex.Concat((ex.Read(("a",), (4, 3)), ex.Read(("b",), (6, 3)))), 0, 1, 4),
            "slice(read a [4, 3], dim 0, 1:4)",
        ),
        (
            ex.Slice(ex.Concat((ex.Read(("a",), (4, 3)), ex.Read(("b",), (6, 3)))), 0, 2, 6),
            "concat(slice(read a [4, 3], dim 0, 2:4), slice(read b [6, 3], dim 0, 0:2), 0)",
        ),
        (
            ex.Slice(ex.Permute(ex.Read(("a",), (4, 3)), (1, 0)), 0, 1, 2),
            "permute(slice(read a [4, 3], dim 1, 1:2), (1, 0))",
        ),
        (ex.Slice(ex.Slice(ex.Read(("a",), (9, 9)), 0, 2, 8), 0, 1, 3), "slice(read a [9, 9], dim 0, 3:5)"),
        (
            ex.Slice(ex.Slice(ex.Read(("a",), (9, 9)), 1, 2, 8), 0, 1, 3),
            "slice(slice(read a [9, 9], dim 0, 1:3), dim 1, 2:8)",
        ),
        (ex.Slice(ex.Stack((ex.Read(("a",), (2, 3)), ex.Read(("b",), (2, 3)))), 0, 1, 2), "stack(read b [2, 3])"),
        (
            ex.Slice(ex.Reshape(ex.Read(("a",), (6, 4)), (2, 3, 4)), 0, 1, 2),
            "reshape(slice(read a [6, 4], dim 0, 3:6), (1, 3, 4))",
        ),
        (
            ex.Slice(ex.Pad(ex.Read(("a",), (4, 3)), 0, 0, 2), 0, 2, 6),
            "pad(slice(read a [4, 3], dim 0, 2:4), 0, 0, 2, 0.0)",
        ),
        (ex.Slice(ex.Read(("a",), (8, 2)), 0, 0, 4, 4), "slice(read a [8, 2], dim 0, 0:4 + 4 rank)"),
        (
            ex.Slice(decoded("int8", ("a",), (64, 128)), 0, 16, 48),
            "decode(int8, slice(read a int8 [4, 2, 16, 16, 4], dim 0, 1:3), "
            "slice(read a_scale bfloat16 [4, 2, 16], dim 0, 1:3))",
        ),
        (
            ex.Slice(decoded("int8", ("a",), (64, 100)), 1, 64, 100),
            "decode(int8, slice(read a int8 [4, 2, 16, 16, 4], dim 1, 1:2), "
            "slice(read a_scale bfloat16 [4, 2, 16], dim 1, 1:2))",
        ),
    ],
    ids=str,
)
def test_slices_come_down_to_the_reads(expr: ex.Expr, text: str) -> None:
    assert str(simplify(expr)) == text
    assert simplify(expr).shape == expr.shape


@pytest.mark.parametrize(
    "expr",
    [
        ex.Slice(decoded("int8", ("a",), (64, 128)), 0, 8, 24),  # inside a block
        ex.Slice(decoded("int8", ("a",), (64, 128)), 1, 64, 100),
        ex.Slice(ex.Reshape(ex.Read(("a",), (6, 4)), (4, 6)), 0, 1, 2),
        ex.Slice(
            ex.Concat((ex.Read(("a",), (4, 3)), ex.Read(("b",), (4, 3)))), 0, 0, 4, 4
        ),  # which part, is known with the rank
    ],
    ids=str,
)
def test_slices_that_stay(expr: ex.Expr) -> None:
    assert simplify(expr) == expr


def test_ranks_divide_what_one_holds() -> None:
    """Every rank's slices, one behind the other, are the whole; slices of slices add up."""
    x = torch.arange(96.0).view(8, 12)
    expr = ex.Slice(ex.Slice(ex.Read(("x",), (8, 12)), 0, 0, 4, 4), 1, 0, 3, 3)
    assert region_of(simplify(at_rank(expr, 1))) == Region(ex.Read(("x",), (8, 12)), (4, 3), (8, 6))
    found = [evaluate(simplify(at_rank(expr, r)), fetch_from({"x": x})) for r in range(2)]
    assert torch.equal(found[0], x[:4, :3])
    assert torch.equal(found[1], x[4:, 3:6])


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (ex.Slice(ex.Read(("a",), (4, 3)), 0, 2, 6), "entries 2 to 6 of dimension 0"),
        (ex.Slice(ex.Read(("a",), (4, 3)), 2, 0, 1), "dimension 2 of"),
        (ex.Concat((ex.Read(("a",), (4, 3)), ex.Read(("b",), (4, 2)))), "do not fit along dimension 0"),
        (ex.Stack((ex.Read(("a",), (4, 3)), ex.Read(("b",), (4, 2)))), "cannot be stacked"),
        (ex.Reshape(ex.Read(("a",), (4, 3)), (5,)), "reshaped"),
        (ex.Permute(ex.Read(("a",), (4, 3)), (0, 0)), "dimensions"),
        (ex.Decode("int8", (ex.Read(("a",), (1,)), ex.Read(("b",), (1,))), (16, 64)), "values of int8 for"),
        (ex.Values((1.0,), (2,)), "1 values for shape"),
    ],
    ids=str,
)
def test_a_contradiction_is_told(expr: ex.Expr, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = expr.shape


TYPED = {
    "int32": torch.tensor([[1, -(2**31)], [7, 2**31 - 1]], dtype=torch.int32),
    "uint8": torch.tensor([[0, 255]], dtype=torch.uint8),
    "int8": torch.tensor([[-128, 127]], dtype=torch.int8),
    "bool": torch.tensor([[True, False]]),
    "int64": torch.tensor([[2**40]]),
    "float8_e4m3fn": torch.tensor([[1.5, -448.0]]).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.tensor([[1.5, -57344.0]]).to(torch.float8_e5m2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPED)
def test_every_dtype(tmp_path: Path, dtype: str, device: str) -> None:
    """As it is stored, transposed, and cast to another dtype; with a dtype that is not the stored one it is refused."""
    x = TYPED[dtype]
    save_file({"x": x}, tmp_path / "model.safetensors")
    read = ex.Read(("x",), tuple(x.shape), dtype)
    entries = (
        Entry("same", tuple(x.shape), dtype, read),
        Entry("turned", tuple(x.T.shape), dtype, ex.Permute(read, (1, 0))),
        Entry("wide", tuple(x.shape), "float64", read),
    )
    w = load_weights(WeightPlan(entries), Checkpoint.open(tmp_path), device)
    bits = {1: torch.uint8, 4: torch.int32, 8: torch.int64}[x.itemsize]
    assert torch.equal(w["same"].cpu().view(bits), x.view(bits))
    assert torch.equal(w["turned"].cpu().view(bits), x.T.contiguous().view(bits))
    assert torch.equal(w["wide"].cpu(), x.double())
    other = "int16" if dtype != "int16" else "int32"
    plan = WeightPlan((Entry("x", tuple(x.shape), other, ex.Read(("x",), tuple(x.shape), other)),))
    with pytest.raises(WeightError, match=r"x: dtype \w+, the model needs I16"):
        check_checkpoint(plan, Checkpoint.open(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_encoding_any_expression(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Encoded while they are read, in many small reads: the same bits as encoding the whole matrix at once."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(40, 200).to(dtype), "b": torch.randn(200, 24).to(dtype), "e": torch.randn(3, 24, 200)}
    save_file(tensors, tmp_path / "model.safetensors")
    a, b, e = ex.Read(("a",), (40, 200)), ex.Read(("b",), (200, 24)), ex.Read(("e",), (3, 24, 200))
    one = ex.Reshape(ex.Slice(e, 0, 1, 2), (24, 200))
    matrices = {
        "rows": ex.Slice(a, 0, 5, 38),
        "columns": ex.Slice(a, 1, 3, 150),
        "merged": ex.Concat((a, ex.Permute(b, (1, 0)), one)),
        "repeated": ex.Repeat(ex.Slice(a, 0, 0, 9), 0, 3),
        "padded": ex.Pad(a, 0, 0, 8),
        "side by side": ex.Concat((a, a), 1),
    }
    entries = [
        Entry(f"{n}.{part}", ex.Encode(name, part, m).shape, dtype_of, ex.Encode(name, part, m))
        for n, m in matrices.items()
        for part, dtype_of in (("values", "int8" if name == "int8" else "uint8"), ("scales", "bfloat16"))
    ]
    experts = tuple(ex.Encode(name, "values", ex.Reshape(ex.Slice(e, 0, i, i + 1), (24, 200))) for i in range(3))
    entries.append(Entry("experts", ex.Stack(experts).shape, entries[0].dtype, ex.Stack(experts)))
    with small_reads():
        w = load_weights(WeightPlan(tuple(entries)), Checkpoint.open(tmp_path))
    for entry in entries[:-1]:
        assert isinstance(entry.expr, ex.Encode)
        whole = ex.Encode(name, entry.expr.part, entry.expr.matrix)
        assert torch.equal(w[entry.name], evaluate(whole, fetch_from(tensors))), entry.name
    for i, expert in enumerate(experts):
        assert torch.equal(w["experts"][i], evaluate(expert, fetch_from(tensors)))


def test_what_is_stored_encoded_stays_as_it_is() -> None:
    """Matrices in an encoding merge at whole blocks; encoding what was decoded is reading it."""
    q, k, odd = (decoded("int8", (n,), (rows, 128)) for n, rows in (("q", 32), ("k", 16), ("odd", 20)))
    assert same_encodings(ex.Concat((q, k))) == ("int8",)
    for i, part in enumerate(("values", "scales")):
        assert simplify(ex.Encode("int8", part, ex.Concat((q, k)))) == ex.Concat((q.parts[i], k.parts[i]))
    assert same_encodings(ex.Concat((q, odd))) == ("int8",)  # the last one may end inside a block
    assert same_encodings(ex.Concat((odd, q))) == ()
    assert same_encodings(ex.Concat((q, ex.Read(("plain",), (16, 128))))) == ()
    assert same_encodings(ex.Read(("plain",), (16, 128))) == ()
    assert simplify(ex.Encode("int8", "scales", q)) == q.parts[1]
    assert not any(isinstance(e, ex.Decode) for e in ex.walk(simplify(ex.Encode("int8", "values", ex.Concat((q, k))))))
