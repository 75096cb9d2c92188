"""What kernels in Gluon share that multiply with int4 weights: how codes become bf16 numbers, exactly."""

# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SPAN, GROUP = gl.constexpr(256), gl.constexpr(128)  # inner entries that share int16 numbers, and a scale
ADDED = gl.constexpr(136)  # to a code less 8, by `decoded`
_UNNAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))  # until Triton 3.6


@gluon.jit
def decoded(words):
    """bf16 numbers of the four codes of each int16, 128 added to a code: its bits are the last of a mantissa."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t;
        lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xEA;
        shr.b32 t, $4, 4;
        lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xEA;
        shr.b32 t, $4, 8;
        lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xEA;
        shr.b32 t, $4, 12;
        lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xEA; }""",
        "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


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
