"""Triton kernels on their way into an artifact, for `test_triton_calls.py`: a program, because it needs Triton's
compiler where the tests have its interpreter. Prints one JSON object."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.codegen import inductor
from graphllm.compile.codegen.cubins import TargetOnly, compiled, described
from graphllm.compile.codegen.jobs import Tunable
from graphllm.compile.codegen.translate import Bundle, translate
from graphllm.compile.tuning.tune import build_candidate
from graphllm.config import Bucket, Target
from graphllm.ir import launch_triton
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.op import CallSite, all_ops
from graphllm.ir.registry import load_ops
from graphllm.ir.triton import GRID, TritonCall, changing, give_scratch
from graphllm.rewrite import ImplChoice

TARGET = Target("cuda", ("sm_90", "sms_132"))
EXPERTS: dict[str, tuple[Any, ...]] = {  # arguments of `fused_moe`: dtype and shape
    "x_TD": ("bfloat16", "T", 64), "gate_up_N2FD": ("bfloat16", 20, 96, 64), "down_NDF": ("bfloat16", 20, 64, 48),
    "weights_TA": ("float32", "T", 2), "experts_TA": ("int32", "T", 2),
}  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["T"])
def shift_kernel(
    x_ptr, y_ptr, none_ptr, T, count, wide, by, turned, out_ptr, BLOCK: tl.constexpr, MORE: tl.constexpr = 3
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < T, other=0.0) + tl.load(y_ptr + at, mask=at < T, other=0.0)
    if none_ptr is None:
        x += by * MORE
    if turned:
        x = -x
    tl.store(out_ptr + at, x + count + (wide % 7) * 0.5, mask=at < T)


@triton.autotune([triton.Config({"BLOCK": 16})], key=[])
@triton.jit
def tuned_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, 0.0)


def shift(x: Tensor, count: int = 5, wide: int = 2**40, kernel: Any = shift_kernel, **changes: Any) -> Tensor:
    """Launches the kernel on [T] numbers and what follows the first of them."""
    out = torch.empty_like(x)
    T = x.shape[0]
    given = {"BLOCK": 64, "num_warps": 2} | changes
    launch_triton(kernel, (T // 64 + 1, 2), x, x[1:], None, T, count, wide, 0.5, True, out, **given)
    return out


def sizes_of_a_step() -> tuple[Shapes, Tensor]:
    """T from 2 to 512, and T numbers."""
    shapes = Shapes("cpu", Bucket("decode", 2, 512))
    return shapes, shapes.tensor(TensorSpec.contiguous("float32", "T"))


def bundle_of(launch: Callable[..., Any], tensors: Mapping[str, Tensor], shapes: Shapes) -> Bundle:
    """A function of these traced, written down and taken apart."""
    inputs = list(tensors.values())
    with shapes.mode, torch.no_grad():
        graph = make_fx(lambda *given: launch(**dict(zip(tensors, given, strict=True))))(*inputs)
    return translate(inductor.generate(graph, inputs, shapes), inputs, shapes)


def recorded(count: int, wide: int, kernel: Any = shift_kernel) -> tuple[TritonCall, list[str], list[int | None]]:
    """What `compiled` is given of a launch with these."""
    shapes, x = sizes_of_a_step()
    with shapes.mode, torch.no_grad():
        graph = make_fx(lambda x: shift(x, count, wide, kernel))(x).graph
    (node,) = (n for n in graph.nodes if "graphllm_triton" in str(n.target))
    tensors, numbers, _, text = node.args
    dtypes = [str(t.meta["val"].dtype).removeprefix("torch.") for t in tensors]
    return TritonCall.of(text), dtypes, [n if isinstance(n, int) else None for n in numbers]


def by_triton(count: int, wide: int) -> Any:
    """The same launch compiled by Triton as it would start it; T is no multiple of 16, the second pointer neither."""
    x = torch.empty(513, device="meta")

    class Odd:
        dtype = torch.float32

        def data_ptr(self) -> int:
            return 4

    return shift_kernel.warmup(
        x, Odd(), None, 513, count, wide, 0.5, True, x, grid=(9, 2), BLOCK=64, num_warps=2, launch_pdl=False
    )


def beside_triton() -> list[bool]:
    """For some integers, whether what is built is the kernel that Triton starts."""
    cases = ((5, 2**40), (1, 32), (48, 1), (2**31, -(2**31)), (0, 2**31 - 1))
    return [compiled(*recorded(*case), TARGET).hash == by_triton(*case).hash for case in cases]


def defined_again() -> list[str]:
    """The names of a kernel and of one that is made of the same function later, before and after that."""
    return [recorded(5, 7, kernel)[0].kernel for kernel in (shift_kernel, triton.jit(shift_kernel.fn), shift_kernel)]


def asked_again() -> bool:
    """Whether a launch of ours has memory of ours, after a kernel of Inductor, which sets Triton's function for it."""
    function = triton.runtime._allocation._allocator
    give_scratch()
    triton.set_allocator(inductors := lambda size, align, stream: torch.empty(size))
    give_scratch()
    return function.get() is not inductors


def refused() -> dict[str, str]:
    """What is said of launches that cannot be recorded."""

    def said(launch: Any) -> str:
        shapes, x = sizes_of_a_step()
        try:
            with shapes.mode:
                make_fx(launch)(x)
        except TypeError as error:
            return str(error)
        return ""

    return {
        "autotuned": said(lambda x: launch_triton(tuned_kernel, (1,), x)),
        "a type": said(lambda x: shift(x, MORE=tl.float32)),
    }


def fixed(constant: Callable[[Any], Any]) -> str:
    """The sizes that a launch with this constant, of T, makes fixed."""
    shapes, x = sizes_of_a_step()
    with shapes.mode:
        make_fx(lambda x: shift(x, MORE=constant(x.shape[0])))(x)
    return shapes.fixed()


def taken_apart() -> dict[str, Any]:
    """A graph with a launch between two sums, as Inductor writes it down and as a bundle has it."""
    shapes, x = sizes_of_a_step()
    bundle = bundle_of(lambda x: shift(x + 1) * 2, {"x": x}, shapes)
    made = {name: described(k, TARGET) for name, k in bundle.kernels.items() if "call" in k}
    for kernel in made.values():
        kernel["cubin"] = kernel["cubin"][:4].hex()
    return {"code": bundle.code, "kernels": made}


def entries(folder: Path) -> set[str]:
    """Of Triton's cache: the kernels."""
    return {file.parent.name for file in folder.glob("*/*.cubin")}


def found_again() -> dict[str, list[int]]:
    """Kernels of linear layers that a worker compiles for tuning, and those that building then compiles beside them."""
    cache, counts = Path(os.environ["TRITON_CACHE_DIR"]), {}
    op = all_ops()["fused_linear"]
    x, weight = TensorSpec.contiguous("bfloat16", "T", 256), TensorSpec.contiguous("bfloat16", 512, 256)
    constants = {"block_t": 16, "block_n": 64, "block_k": 128, "splits": 2, "warps": 4, "stages": 3, "token_tiles": 1,
                 "direct": 0, "norm": 0, "low_rows": 0, "low_splits": 1}  # fmt: skip
    for bucket in (Bucket("decode", 2, 16), Bucket("decode", 17, 32)):
        shapes = Shapes("cpu", bucket)
        fakes = {"x_TI": shapes.tensor(x), "weight_OI": shapes.tensor(weight)}
        plain = {n: v for n, v in op.bind((), fakes).items() if n not in fakes}
        site = Tunable("fused_linear", {"x_TI": x, "weight_OI": weight}, plain, bucket.limits(64), [])
        before = entries(cache)
        assert build_candidate(site, ImplChoice("triton_tile", constants)) == ""
        compiled = entries(cache)
        launch = functools.partial(op.impls["triton_tile"].fn, **plain, **constants)
        for kernel in bundle_of(launch, fakes, shapes).kernels.values():
            described(kernel, TARGET)
        counts[bucket.name] = [len(compiled - before), len(entries(cache) - compiled)]
    return counts


def of_experts() -> dict[str, Any]:
    """Each implementation of `fused_moe` for any GPU as a bundle, for a bucket that it serves; see `EXPERTS`."""
    serves = {
        "triton_one": Bucket("decode", 1, 1),
        "triton_few": Bucket("decode", 2, 8),
        "triton_sorted": Bucket("decode", 33, 64),
    }
    return {name: _experts(name, bucket) for name, bucket in serves.items()}


def _experts(name: str, bucket: Bucket) -> dict[str, Any]:
    op, shapes = all_ops()["fused_moe"], Shapes("cpu", bucket)
    fakes = {n: shapes.tensor(TensorSpec.contiguous(*spec)) for n, spec in EXPERTS.items()}
    args = op.bind((), fakes)
    plain = {n: v for n, v in args.items() if n not in EXPERTS}
    site = CallSite(args, TARGET, bucket, lambda size: bucket.hi)
    assert op.impls[name].supports(site)
    launch = functools.partial(op.impls[name].fn, **plain, **op.impls[name].configs(site)[0])
    bundle = bundle_of(launch, fakes, shapes)
    calls = {n: TritonCall.of(k["call"]) for n, k in bundle.kernels.items()}
    return {
        "inputs": bundle.inputs, "outputs": bundle.outputs, "code": bundle.code,
        "kernels": {n: [call.kernel, [*changing(call), *GRID], call.fixed] for n, call in calls.items()},
    }  # fmt: skip


if __name__ == "__main__":
    load_ops()
    triton.runtime.driver.set_active(TargetOnly(TARGET))
    told = {"as started": beside_triton(), "refused": refused(), "apart": taken_apart(),
            "fixed": [fixed(lambda T: T), fixed(lambda T: T < 600)]}  # fmt: skip
    told |= {"found again": found_again(), "experts": of_experts(), "again": defined_again(), "asked": asked_again()}
    print(json.dumps(told))
