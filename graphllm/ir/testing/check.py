"""Check an op against its specification: the one list of checks of the shared test suite and `graphllm op test`.

The reference in float64 is the truth. The reference in the model dtypes, and every implementation wherever its
``supports`` holds, must agree with it within the case's tolerance; fakes must describe the real outputs exactly.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphllm.config import Bucket, Target
from graphllm.host.machine import detect_target
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.op import CallSite, Impl, Op
from graphllm.ir.registry import load_ops
from graphllm.ir.testing.cases import Case, Maker

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INTERPRETED = Target("cuda", ("sm_90", "sms_132"), "the Triton interpreter")
Layout = Literal["as drawn", "sliced"]
_MOST_TRUTHS = 512
_truths: OrderedDict[object, Any] = OrderedDict()
_described: dict[tuple[torch._ops.OpOverload, str], list[Any]] = {}  # by op and call: the forms of its fake's results


@dataclass(frozen=True)
class Result:
    """One check. subject: "specification" or an implementation's name. error, tolerance: see `Case`. problem: what is
    wrong, empty when nothing is.
    """

    op: str
    subject: str
    case: str
    dtype: str
    error: float = 0.0
    tolerance: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        where = " ".join(part for part in (self.op, self.subject, self.case, self.dtype) if part)
        return f"{where}: {self.problem or f'ok, error {self.error:.1e} of {self.tolerance:.1e}'}"


def check_op(name: str) -> list[Result]:
    """Every check of one op on this machine: its specification, then each implementation that can run here.

    Raises KeyError for an unknown op.
    """
    op = load_ops()[name]
    cases = cases_of(op)
    return check_specification(op, cases) + [r for impl in op.impls.values() for r in check_impl(op, impl, cases)]


def cases_of(op: Op) -> tuple[Case, ...]:
    """The cases in the op's folder: ``CASES`` in ``cases.py``, none when there is no such file."""
    module = op.reference.__module__.rpartition(".")[0] + ".cases"
    if importlib.util.find_spec(module) is None:
        return ()
    return tuple(importlib.import_module(module).CASES)


def check_specification(op: Op, cases: Sequence[Case], few: bool = False) -> list[Result]:
    """Documentation, cases, cost, torch's own opcheck, the fake and the reference's rounding, on the CPU. few: only of
    cases with a trait that none before has had."""

    def result(case: str, dtype: str, problem: str, error: float = 0.0, tolerance: float = 0.0) -> Result:
        return Result(op.name, "specification", case, dtype, error, tolerance, problem)

    cases = [c for c in cases if c.size == "small"]
    results = [result("", "", "" if op.__doc__ else "the reference has no docstring")]
    results.append(result("", "", "" if cases else "there are no small cases in a cases.py in the op's folder"))
    if cases and not any(c.bucket.lo == 0 for c in cases):
        results.append(result("", "", "cases.py has no case without tokens (bucket.lo == 0)"))
    traced: set[object] = set()  # kinds of calls: tracing sees no numbers, and takes seconds
    seen: set[object] = set()
    for case in cases:
        if few and (traits := _traits(op, case)) <= seen:
            continue
        seen |= traits if few else set()
        for i, (dtype, tolerance) in enumerate(case.tolerance.items()):
            for layout in _layouts(case, dtype):
                args = _inputs(op, case, dtype, layout=layout)
                name = case.name if layout == "as drawn" else f"{case.name} {layout}"
                error, problem = _run(op, case, dtype, op, args, tolerance)
                results.append(result(name, dtype, problem, error, tolerance))
            if i == 0:
                args = _inputs(op, case, dtype)
                problem = _cost_problem(op, args) or _rowwise_problem(op, case, args)
                if (kind := _call_kind(args, case.bucket)) not in traced:
                    problem = problem or _opcheck_problem(op, args) or _dynamic_problem(op, case, args)
                    traced.add(kind)
                results.append(result(case.name, dtype, problem))
    return results


def _call_kind(args: Mapping[str, Any], bucket: Bucket) -> frozenset[tuple[str, object]]:
    """What tells calls of an op apart but for their sizes and numbers: which arguments are given, their dtypes and
    dimensions, flags and names, whether numbers are zero, and whether there are no rows, one or several."""

    def kind(value: Any) -> object:
        if isinstance(value, Tensor):
            return str(value.dtype), value.dim()
        if isinstance(value, (list, tuple)):
            return tuple(kind(v) for v in value)
        return value if value is None or isinstance(value, (str, bool)) else bool(value)

    return frozenset({*((n, kind(v)) for n, v in args.items()), ("rows", min(bucket.lo, 2))})


def check_impl(op: Op, impl: Impl, cases: Sequence[Case], real: bool | None = None, few: bool = False) -> list[Result]:
    """One implementation against the float64 reference on every case and layout where its ``supports`` holds.

    CUDA implementations run natively, with the real sizes too, where there is a GPU; else on CPU tensors, which takes
    TRITON_INTERPRET=1 in the environment before Triton is imported and is so slow that each case runs in one dtype, by
    turns. Launch constants take turns too. real: include the real sizes; None decides by that. few: only cases with a
    trait that none before has had of those that it supports, interpreted in one layout each, by turns.
    """
    native = impl.device == "cuda" and torch.cuda.is_available()
    if impl.device == "cuda" and not native and os.environ.get("TRITON_INTERPRET") != "1":
        return []
    device = torch.device("cuda" if native else "cpu")
    interpreted = impl.device == "cuda" and not native
    target = _INTERPRETED if interpreted else detect_target("cuda" if native else "cpu")
    results: list[Result] = []
    seen: set[object] = set()
    for number, case in enumerate(cases):
        if case.size == "real" and not (native if real is None else real):
            continue
        traits, before = _traits(op, case) if few else set(), len(results)
        if few and traits <= seen:
            continue
        dtypes = list(case.tolerance)
        for dtype in [dtypes[number % len(dtypes)]] if interpreted else dtypes:
            tolerance = case.tolerance[dtype]
            layouts = _layouts(case, dtype)
            for layout in layouts[number % len(layouts) :][:1] if few and interpreted else layouts:
                args = _inputs(op, case, dtype, device, layout)
                site = CallSite(_fakes(args), target, case.bucket)
                if not impl.supports(site):
                    site = site._replace(deterministic=True)  # some serve no others
                if not impl.supports(site):
                    continue
                name = case.name if layout == "as drawn" else f"{case.name} {layout}"
                configs = impl.configs(site)
                picked = {number % len(configs)} if interpreted else {0, number % len(configs), -number % len(configs)}
                for config in (configs[i] for i in sorted(picked)):
                    args = _inputs(op, case, dtype, device, layout)
                    error, problem = _run(op, case, dtype, functools.partial(impl.fn, **config), args, tolerance)
                    tried = " ".join([name, *(f"{k}={v}" for k, v in config.items())])
                    results.append(Result(op.name, impl.name, tried, dtype, error, tolerance, problem))
                if layout == "as drawn" and not interpreted:
                    results += _alone(op, impl, case, dtype, args, site._replace(deterministic=True))
        seen |= traits if len(results) > before else set()
    return results


def _traits(op: Op, case: Case) -> frozenset[object]:
    """The kind of its call, and which tensors have rows of a length that is no multiple of 16."""
    args, bucket = _inputs(op, case, next(iter(case.tolerance))), case.bucket
    rows = {(n, v.shape[-1] % 16 > 0) for n, v in args.items() if isinstance(v, Tensor) and v.dim() > 1}
    return _call_kind(args, bucket) | rows | {bucket.kind, ("several", bucket.query_len > 1)}


def _layouts(case: Case, dtype: str) -> tuple[Layout, ...]:
    """Strides do not depend on the dtype, so the first one stands for all."""
    return ("as drawn", "sliced") if dtype == next(iter(case.tolerance)) else ("as drawn",)


def _inputs(
    op: Op, case: Case, dtype: str, device: torch.device | None = None, layout: Layout = "as drawn"
) -> dict[str, Any]:
    """The case's arguments by name, equal for every layout."""
    device = device or torch.device("cpu")
    seed = zlib.crc32(f"{op.name}/{case.name}".encode())
    maker = Maker(torch.Generator(device).manual_seed(seed), device, _DTYPES[dtype])
    args = op.bind((), case.inputs(maker))
    if layout == "sliced":
        args = {k: v if k in op.mutates else _map_tensors(_slice_rows, v) for k, v in args.items()}
    return args


def _slice_rows(t: Tensor) -> Tensor:
    """The same values as rows of a wider tensor, as a view of a merged projection has them."""
    if t.dim() < 2 or not t.is_floating_point():
        return t
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 8), float("nan"))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def _run(
    op: Op, case: Case, dtype: str, fn: Callable[..., Any], args: dict[str, Any], tolerance: float
) -> tuple[float, str]:
    """Call ``fn``; its error against the reference in float64 on the same values, and what is wrong."""
    try:
        truth, wide = _truth(op, case, dtype, args)
        found = fn(**args)
        error, problem = _compare(op, case, args, found, truth, wide, tolerance)
        return error, "; ".join(filter(None, [problem, _fake_problem(op, args, found)]))
    except Exception as failure:  # whatever a body raises is a finding, and other cases are still to be run
        return float("inf"), f"{type(failure).__name__}: {failure}"


def _truth(op: Op, case: Case, dtype: str, args: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What the reference gives in float64, and its arguments with what it has written in place. Kept for small cases,
    which draw the same numbers again for the next implementation."""
    device = next((t.device for t in _tensors(list(args.values()))), None)
    key = (id(op), id(case), dtype, device)
    if key not in _truths:
        # Copies, made before anything is written. What is rounded to 8 bits as it is written keeps its dtype.
        keep = {k for k in op.mutates if args[k].itemsize == 1}
        wide = {k: v.clone() if k in keep else _map_tensors(_widen, v) for k, v in args.items()}
        found = op.reference(**wide), wide
        if case.size != "small":
            return found
        if len(_truths) >= _MOST_TRUTHS:
            _truths.popitem(last=False)
        _truths[key] = (op, case, *found)  # the first two keep their ids
    return _truths[key][2:]


def _widen(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.is_floating_point() else t.dtype, copy=True)


def _fakes(args: Mapping[str, Any], mode: FakeTensorMode | None = None) -> dict[str, Any]:
    mode = mode or FakeTensorMode()
    return {k: _map_tensors(mode.from_tensor, v) for k, v in args.items()}


def _map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(fn, v) for v in value)
    return fn(value) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _compare(
    op: Op, case: Case, args: dict[str, Any], found: Any, truth: Any, truth_args: dict[str, Any], tolerance: float
) -> tuple[float, str]:
    """The largest relative error over outputs and tensors written in place, and what is wrong with it."""
    outputs = enumerate(zip(_tensors(found), _tensors(truth), strict=True))
    pairs = [(f"output {i}", case.specified(got, args), case.specified(want, args)) for i, (got, want) in outputs]
    for name in op.mutates:
        pairs.append((name, case.written(name, args[name], args), case.written(name, truth_args[name], args)))
    worst, problems = 0.0, list[str]()
    for name, got, want in pairs:
        if got.shape != want.shape:
            worst = float("inf")
            problems.append(f"{name} has shape {list(got.shape)}, not {list(want.shape)}")
            continue
        error = relative_error(got, want)
        worst = max(worst, error)
        if not error <= tolerance:
            problems.append(f"{name} is off by {error:.2e}, more than {tolerance:.1e} ({case.reason})")
    return worst, "; ".join(problems)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """||found - truth|| / ||truth|| in float64; for integers the share that differs; infinite if finiteness differs."""
    if not truth.is_floating_point():
        return float((found != truth).double().mean()) if truth.numel() else 0.0
    found, truth = found.double(), truth.double()
    finite = truth.isfinite()
    if not torch.equal(found.isfinite(), finite) or not torch.equal(found[~finite], truth[~finite]):
        return float("inf")
    norm = float(truth[finite].norm())
    return float((found[finite] - truth[finite]).norm()) / (norm or 1.0)


def _rowwise_problem(op: Op, case: Case, args: dict[str, Any]) -> str:
    """Whether some rows of an op that calls itself row-wise are not what those rows of the arguments give."""
    T = case.bucket.lo
    if not op.rowwise or T < 2:
        return ""
    rows = [T - 1, 0]
    some = {name: a[rows] if isinstance(a, Tensor) and _has_row_each(name, a, T) else a for name, a in args.items()}
    for found, whole in zip(_tensors(op(**some)), _tensors(op(**args)), strict=True):
        if not relative_error(found, whole[rows]) <= max(case.tolerance.values()):
            return "the op calls itself rowwise, but rows by themselves give something else"
    return ""


def _alone(op: Op, impl: Impl, case: Case, dtype: str, args: dict[str, Any], site: CallSite) -> Iterator[Result]:
    """Of an implementation that says how it computes a row: whether rows by themselves are bitwise equal to those in
    their batch."""
    T = case.bucket.lo
    if not op.rowwise or T < 2 or not impl.supports(site):
        return
    for config in impl.configs(site):
        if order := impl.row_order(site, config):
            whole = list(_tensors(impl.fn(**args, **config)))
            problem = ""
            for row in (0, T - 1):
                one = {
                    n: a[row : row + 1] if isinstance(a, Tensor) and _has_row_each(n, a, T) else a
                    for n, a in args.items()
                }
                found = _tensors(impl.fn(**one, **config))
                if not all(torch.equal(f[0], w[row]) for f, w in zip(found, whole, strict=True)):
                    problem = f"it says that it computes rows by {order!r}, but row {row} by itself is different"
            yield Result(op.name, impl.name, f"{case.name} by itself", dtype, problem=problem)


def _dynamic_problem(op: Op, case: Case, args: dict[str, Any]) -> str:
    """Whether the shapes of the results hold for one number of rows only: such an op cannot be compiled."""
    T = case.bucket.lo
    if T < 2:
        return ""
    shapes = Shapes("cpu", Bucket("decode", 2, max(T, 3)))
    fakes = _fakes(args, shapes.mode)
    for name, a in args.items():
        if isinstance(a, Tensor) and _has_row_each(name, a, T):
            dtype = str(a.dtype).removeprefix("torch.")
            fakes[name] = shapes.tensor(TensorSpec.contiguous(dtype, "T", *a.shape[1:]))
    with shapes.mode:
        op(**fakes)
    return f"tracing takes the number of rows for a constant, {fixed}" if (fixed := shapes.fixed()) else ""


def _has_row_each(name: str, value: Tensor, T: int) -> bool:
    """Whether an argument has a row for each token: its name's dimensions begin with T or S if it has any (`x_TD`)."""
    suffix = name.rpartition("_")[2]
    return value.dim() > 0 and value.shape[0] == T and (suffix[0] in "TS" or suffix.islower())


def _fake_problem(op: Op, args: dict[str, Any], found: Any) -> str:
    """How the fake's outputs differ from the real ones in shape, dtype or strides."""
    if (call := (op.overload, _arguments(args))) not in _described:
        mode = FakeTensorMode()
        fakes = _fakes(args, mode)
        with mode:
            _described[call] = [_form(t) for t in _tensors(op(**fakes))]
    for i, (real, fake) in enumerate(zip(_tensors(found), _described[call], strict=True)):
        if _form(real) != fake:
            return f"output {i} has shape, dtype and strides {_form(real)}, but the fake says {fake}"
    return ""


def _arguments(args: Mapping[str, Any]) -> str:
    """A call's arguments, of tensors what a fake sees: implementations get the same ones."""
    seen = {n: _map_tensors(lambda t: (t.shape, t.stride(), t.dtype, t.device), v) for n, v in args.items()}
    return repr(seen)


def _form(t: Tensor) -> tuple[list[int], str, list[int]]:
    """Shape, dtype and the strides that matter, of dimensions longer than 1; none for an empty tensor."""
    strides = [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []
    return list(t.shape), str(t.dtype), strides


def _opcheck_problem(op: Op, args: dict[str, Any]) -> str:
    """What torch's own checks of schema and fake find."""
    small = any(t.is_floating_point() and t.itemsize == 1 for t in _tensors(list(args.values())))
    try:  # the test of the schema computes with all numbers, which torch cannot with 8 bits
        checks = ("test_faketensor",) if small else ("test_schema", "test_faketensor")
        torch.library.opcheck(op.overload, (), args, test_utils=checks)
    except Exception as e:  # opcheck raises whatever the op raised; every kind is a finding
        return f"torch.library.opcheck: {e}"
    return ""


def _cost_problem(op: Op, args: dict[str, Any]) -> str:
    cost = op.cost(**args)
    if all(isinstance(n, int) and n >= 0 for n in cost):
        return ""
    return f"the cost is {cost}, not whole numbers of bytes and operations"
