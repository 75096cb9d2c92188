"""Triton: products with encoded weights, as the left operand, decoded in registers on the way to the tensor cores.

Codes become numbers two at a time: the same bits of two neighbouring int16 are moved to their places in two numbers of
16 bits, which the format of `graphllm.ops.encodings.encoded_weights` makes two neighbouring inner entries.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def lost_exponent(form, half):
    """Numbers are too small by 2 to this power after their bits were moved to their places in bf16 or f16: the
    difference of the exponents' biases. 0 for integers."""
    bias = {"float8": 7, "e2m1": 1}.get(form)
    return 0 if bias is None else {"bf16": 127, "f16": 15}[half] - bias


@triton.constexpr_function
def tiles_of(inner, block_k, span):
    """Tiles of a row of ``inner`` entries, with the padding of encoded weights, which have spans."""
    return -(-inner // span) * (span // block_k) if span else -(-inner // block_k)


@triton.constexpr_function
def _decoding(form, half, moved):
    """PTX that makes of a pair of int16, the last register, a pair of numbers in each of the others. half: bf16 or
    f16. moved: leave out the last step: floats are too small by `lost_exponent`, int4 is 136 (1,032) too large."""
    one = {"bf16": 0x4300, "f16": 0x6400}[half]  # 128 and 1,024: the last bits of the mantissa are the code
    constant, lines = 0, []
    codes = 4 if form == "int4" or form == "e2m1" else 2  # of an int16

    def pair(number):
        return f"0x{number:04x}{number:04x}"

    def shifted(to, of, by):
        if by == 0:
            return f"mov.b32 {to}, ${of};"
        return f"shl.b32 {to}, ${of}, {by};" if by > 0 else f"shr.b32 {to}, ${of}, {-by};"

    for j in range(4):
        if form == "int4":
            constant = {"bf16": 0x4308, "f16": 0x6408}[half]
            lines += [
                shifted("t", 4, -4 * j),
                f"lop3.b32 ${j}, t, 0x000f000f, {pair(one)}, 0xEA;",
                *([] if moved else [f"sub.rn.{half}x2 ${j}, ${j}, c;"]),
            ]
        elif form == "e2m1" and half == "bf16":  # two copies in one product: the sign in its place, and the rest in its
            constant = 0x7E80  # 2 ** 126
            code, at = ("s", j - 2) if j >= 2 else ("$4", j)
            lines += ["shr.b32 s, $4, 8;"] * (j == 2) + [
                f"and.b32 t, {code}, {pair(0xF << 4 * at)};",
                f"mul.lo.u32 t, t, {(1 << 6 | 1 << 12) >> 4 * at};",
                f"and.b32 ${j}, t, {pair(0x81C0)};",
            ]
        elif form == "e2m1":
            constant = 0x7400  # 2 ** 14
            lines += [
                shifted("t", 4, 9 - 4 * j),
                f"and.b32 t, t, {pair(0x0E00)};",
                shifted("s", 4, 12 - 4 * j),
                f"lop3.b32 ${j}, s, 0x80008000, t, 0xEA;",
            ]
        elif j < 2 and form == "float8":
            constant = {"bf16": 0x7B80, "f16": 0x5C00}[half]  # 2 ** 120, 2 ** 8
            place, mask = {"bf16": (4, 0x07F0), "f16": (1, 0x3F80)}[half]
            lines += [
                shifted("s", 2, 8 - 8 * j),
                f"shr.b32 t, s, {place};",
                f"and.b32 t, t, {pair(mask)};",
                f"lop3.b32 ${j}, s, 0x80008000, t, 0xEA;",
            ]
        elif j < 2:  # 128 (1,024) and the lower seven bits, less 128 (1,024), and 128 more for a negative number
            sign = {"bf16": 0x80, "f16": 0x80}[half]
            lines += [
                shifted("t", 2, -8 * j),
                f"lop3.b32 s, t, {pair(0x7F)}, {pair(one)}, 0xEA;",
                f"lop3.b32 t, t, {pair(sign)}, {pair(one)}, 0xEA;",
                f"sub.rn.{half}x2 ${j}, s, t;",
            ]
        if lost_exponent(form, half) and not moved and j < codes:
            lines.append(f"mul.rn.{half}x2 ${j}, ${j}, c;")
    return "{ .reg .b32 t, s, c; mov.b32 c, " + pair(constant) + "; " + " ".join(lines) + " }"


@triton.jit
def numbers_of(words, dtype: tl.constexpr, FORM: tl.constexpr, EMULATED: tl.constexpr, MOVED: tl.constexpr = False):
    """The two or four numbers of every int16, less 8 where they are integers of four bits. MOVED: as `_decoding` says,
    unless emulated."""
    NIBBLES: tl.constexpr = FORM == "int4" or FORM == "e2m1"
    if EMULATED:
        bits = words.to(tl.int32)
        if NIBBLES:
            low = number_of(bits, FORM), number_of(bits >> 4, FORM)
            return low[0], low[1], number_of(bits >> 8, FORM), number_of(bits >> 12, FORM)
        else:
            return number_of(bits, FORM), number_of(bits >> 8, FORM)
    elif NIBBLES and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _decoding(FORM, "bf16", MOVED), "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif NIBBLES:
        return tl.inline_asm_elementwise(
            _decoding(FORM, "f16", MOVED), "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _decoding(FORM, "bf16", MOVED), "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _decoding(FORM, "f16", MOVED), "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def number_of(bits, FORM: tl.constexpr):
    """What the lowest bits of int32 stand for, in float32; without instructions that the interpreter lacks."""
    if FORM == "int4":
        number = ((bits & 15) - 8).to(tl.float32)
    elif FORM == "int8":
        number = (((bits & 255) ^ 128) - 128).to(tl.float32)
    elif FORM == "float8":
        exponent = (bits >> 3) & 15
        part = (bits & 7).to(tl.float32) * 0.125
        number = tl.where(exponent == 0, part * 0.015625, (1.0 + part) * tl.exp2((exponent - 7).to(tl.float32)))
        number = tl.where(bits & 128 != 0, -number, number)
    else:
        exponent = (bits >> 1) & 3
        half = (bits & 1).to(tl.float32) * 0.5
        number = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
        number = tl.where(bits & 8 != 0, -number, number)
    return number


@triton.jit
def scales_at(at, mask):
    """float32 scales."""
    return as_float(tl.load(at, mask=mask, other=0.0))


@triton.jit
def as_float(scales):
    """In float32; uint8 ones are powers of two, 127 added."""
    if scales.dtype == tl.uint8:
        return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return scales.to(tl.float32)


@triton.jit
def less(numbers, zeros, EMULATED: tl.constexpr):
    """Numbers less zero points, two at a time."""
    if EMULATED:
        return numbers - zeros.to(numbers.dtype)
    elif numbers.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, zeros.to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [numbers, zeros.to(tl.float16)], dtype=tl.float16, is_pure=True,
            pack=2,
        )  # fmt: skip


@triton.jit
def _entries(x_row, at, there, K: tl.constexpr, EVEN: tl.constexpr, EMULATED: tl.constexpr):
    """[entries, tokens] of x; zeros where there is no token."""
    mask = there[:, None] if EVEN else there[:, None] & (at < K)[None, :]
    x = tl.load(x_row + at[None, :], mask=mask, other=0.0)
    if EMULATED:
        x = x.to(tl.float32)
    return tl.trans(x)


PUT_OFF = tl.constexpr(63)  # of scales that become part of numbers, the powers of two that sums get in the end


@triton.jit
def _with_scale(numbers, scales, LOST: tl.constexpr, EMULATED: tl.constexpr):
    """Numbers that were only moved to their places, in bf16 too small by 2 ** LOST, times their rows' powers of two:
    exact. Less 2 ** PUT_OFF, so that scales from 2 ** -63 to 2 ** 64 fit together with LOST; larger ones become
    that."""
    if EMULATED:
        return numbers * as_float(scales)[:, None] * 2.0**-PUT_OFF
    else:
        power = (tl.minimum(scales.to(tl.int32), 254 - LOST + PUT_OFF) + (LOST - PUT_OFF)) << 7
        factor = tl.maximum(power, 0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, factor[:, None]], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _side_by_side(numbers, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """[rows, COUNT * width]: numbers of some of the codes, in the order of inner entries."""
    if COUNT == 1:
        return numbers[FIRST]
    elif COUNT == 2:
        pair = tl.permute(tl.join(numbers[FIRST], numbers[FIRST + 1]), (0, 2, 1))
        return tl.reshape(pair, [pair.shape[0], 2 * pair.shape[2]])
    else:
        even = tl.join(numbers[0], numbers[2])
        four = tl.permute(tl.join(even, tl.join(numbers[1], numbers[3])), (0, 2, 3, 1))
        return tl.reshape(four, [four.shape[0], 4 * four.shape[3]])


@triton.jit
def _groups_of(
    tile, scale_at, zero_at, in_row, SCALE_ROW: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr, CODES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of a tile: of each run of codes that have one."""
    scales = ()
    zeros = ()
    if GROUP != 0:
        for j in tl.static_range(0, CODES, TOGETHER):
            first = (tile // (SPAN // BLOCK_K) * SPAN + j * (SPAN // CODES)) // GROUP
            scaled = in_row & (tl.zeros([BLOCK_N], tl.int32) + first * GROUP < K)  # what pads a row has no scale
            scales += (tl.load(scale_at + first * SCALE_ROW, mask=scaled, other=0.0),)
            if ZEROS:
                zeros += (tl.load(zero_at + first * SCALE_ROW, mask=scaled, other=0),)
    elif ZEROS:
        zeros = (tl.load(zero_at, mask=in_row, other=0),)
    return scales, zeros


@triton.jit
def encoded_product(
    weight_row,  # [BLOCK_N, 1] pointers to the first numbers of rows
    scale_at,  # [BLOCK_N] pointers to their first scales
    zero_at,  # and zero points
    in_row,
    x_row,  # [BLOCK_T, 1] pointers
    there, lo, hi,
    SCALE_ROW: tl.constexpr,  # from a group to the next
    K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a span, or half of it
    EVEN: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] float32: rows of weights times rows of x, over tiles lo to hi of BLOCK_K inner entries.

    A tile that is a part of a span has that part of its int16 numbers, so entries in as many stretches as a number has
    codes. Scales are read a tile ahead: they are too small to go through shared memory as the rest does. Those that
    are powers of two become part of the numbers, and the sums go on over groups.
    """
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    dtype: tl.constexpr = tl.float32 if EMULATED else x_row.dtype.element_ty
    CODES: tl.constexpr = 4 if FORM == "int4" or FORM == "e2m1" else 2
    WIDTH: tl.constexpr = BLOCK_K // CODES
    STRETCH: tl.constexpr = SPAN // CODES
    # How many of the products of a tile have one scale.
    TOGETHER: tl.constexpr = CODES if GROUP == 0 or GROUP >= SPAN else GROUP // STRETCH
    ADDED: tl.constexpr = (136 if dtype == tl.bfloat16 else 1032) if FORM == "int4" and ZEROS and not EMULATED else 0
    FOLDED: tl.constexpr = GROUP != 0 and scale_at.dtype.element_ty == tl.uint8 and dtype != tl.float16
    LOST: tl.constexpr = 0 if EMULATED else lost_exponent(FORM, "bf16" if dtype == tl.bfloat16 else "f16")
    AT_ONCE: tl.constexpr = CODES if FOLDED or GROUP == 0 else 1  # codes in one product
    k = tl.arange(0, WIDTH)
    one = tl.arange(0, AT_ONCE * WIDTH)
    entry = one // WIDTH * STRETCH + one % WIDTH
    scales, zeros = _groups_of(
        lo, scale_at, zero_at, in_row, SCALE_ROW, K, GROUP, ZEROS, SPAN, BLOCK_K, TOGETHER, CODES, BLOCK_N
    )
    for tile in range(lo, hi):
        if EVEN:
            words = tl.load(weight_row + (tile * WIDTH + k)[None, :])
        else:
            words = tl.load(weight_row + (tile * WIDTH + k)[None, :], mask=in_row[:, None], other=0)
        scales_now = scales
        zeros_now = zeros
        if GROUP != 0:
            scales, zeros = _groups_of(
                tl.minimum(tile + 1, hi - 1), scale_at, zero_at, in_row, SCALE_ROW, K, GROUP, ZEROS, SPAN, BLOCK_K,
                TOGETHER, CODES, BLOCK_N,
            )  # fmt: skip
        numbers = numbers_of(words, dtype, FORM, EMULATED, ADDED > 0 or (FOLDED and LOST > 0))
        part = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        ready = ()
        for j in tl.static_range(CODES):
            number = numbers[j]
            if ZEROS:
                zero = zeros_now[0 if GROUP == 0 else j // TOGETHER]
                number = less(number, (zero + ADDED)[:, None], EMULATED)
            if FOLDED:
                number = _with_scale(number, scales_now[j // TOGETHER], LOST, EMULATED)
            ready += (number,)
        for j in tl.static_range(0, CODES, AT_ONCE):
            number = _side_by_side(ready, j, AT_ONCE)
            at = tile // (SPAN // BLOCK_K) * SPAN + tile % (SPAN // BLOCK_K) * WIDTH + j * STRETCH
            x = _entries(x_row, at + entry, there, K, EVEN, EMULATED)
            if GROUP == 0 or FOLDED:
                acc = tl.dot(number, x, acc, input_precision="ieee")
            else:
                part = tl.dot(number, x, part, input_precision="ieee")
                if (j + 1) % TOGETHER == 0:
                    acc += part * as_float(scales_now[j // TOGETHER])[:, None]
                    part = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if GROUP == 0:
        acc *= scales_at(scale_at, in_row)[:, None]
    elif FOLDED:
        acc *= 2.0**PUT_OFF
    return acc
