"""What kernels in Gluon share that multiply with int4 weights in groups of 128: exact bf16 numbers of their codes."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphllm.ir import CallSite, runs_gluon
from graphllm.ops.gemm.fused_linear.triton_fused_linear import half

SPAN, GROUP = gl.constexpr(256), gl.constexpr(128)  # inner entries that share int16 numbers, and a scale
ADDED = gl.constexpr(136)  # to a code less 8, by `decoded`
_UNNAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))  # until Triton 3.6


@triton.constexpr_function
def _decoding(second):
    """PTX: of a pair of int16, $2, the numbers of the first two codes in $0 and $1, or of the second two."""
    shifts = (8, 12) if second else (0, 4)
    lines = [
        (f"shr.b32 t, $2, {shift}; " if shift else "mov.b32 t, $2; ")
        + f"lop3.b32 ${j}, t, 0x000f000f, 0x43004300, 0xEA;"
        for j, shift in enumerate(shifts)
    ]
    return "{ .reg .b32 t; " + " ".join(lines) + " }"


@gluon.jit
def decoded(words, second: gl.constexpr):
    """bf16 numbers of two codes of each int16, of one group: 128 added, as a code becomes the last bits of a
    mantissa."""
    return gl.inline_asm_elementwise(
        _decoding(second), "=&r,=&r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def less(numbers, zeros):
    """Numbers less what was added to their codes and their zero points, two at a time."""
    return gl.inline_asm_elementwise(
        "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, zeros], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def seen_as(buffer, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Shared memory in another shape, or, with a layout of fewer dimensions than that, as many buffers as the first
    dimension says."""
    if _UNNAMED:
        return buffer._reinterpret(buffer.dtype, SHAPE, layout)
    else:
        return buffer.reinterpret(buffer.dtype, SHAPE, layout)


def reads_int4(site: CallSite) -> bool:
    """Whether such kernels can read x and the weights of a site, and run there."""
    x, weight, scales = (site.args[name] for name in ("x_TI", "weight_OI", "scales_GO"))
    tensors = [t for t in site.args.values() if isinstance(t, torch.Tensor)]
    return (
        site.args["form"] == "int4"
        and site.args["group"] == GROUP.value
        and site.args["a_LRI"] is None
        and all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)
        and x.stride(0) % 8 == 0
        and x.dtype == torch.bfloat16
        and scales.dtype.itemsize == 2
        and x.shape[1] % SPAN.value == 0
        and weight.shape[0] % 16 == 0
        and half(site)
        and runs_gluon(site.target)
    )
