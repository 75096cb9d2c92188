"""Number formats of tensors: name in torch, tag in safetensors files, size. The one table of them; no torch."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """name: as in ``torch.<name>``. tag: in the header of a safetensors file. itemsize: bytes of one number."""

    name: str
    tag: str
    itemsize: int


DTYPES = {
    d.name: d
    for d in (
        Dtype("bfloat16", "BF16", 2),
        Dtype("float16", "F16", 2),
        Dtype("float32", "F32", 4),
        Dtype("float64", "F64", 8),
        Dtype("float8_e4m3fn", "F8_E4M3", 1),
        Dtype("float8_e5m2", "F8_E5M2", 1),
        Dtype("float8_e8m0fnu", "F8_E8M0", 1),
        Dtype("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
        Dtype("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
        Dtype("bool", "BOOL", 1),
        Dtype("uint8", "U8", 1),
        Dtype("int8", "I8", 1),
        Dtype("uint16", "U16", 2),
        Dtype("int16", "I16", 2),
        Dtype("uint32", "U32", 4),
        Dtype("int32", "I32", 4),
        Dtype("uint64", "U64", 8),
        Dtype("int64", "I64", 8),
    )
}
BY_TAG = {d.tag: d for d in DTYPES.values()}
ITEMSIZE = {d.name: d.itemsize for d in DTYPES.values()}
PLAIN = ("bfloat16", "float16", "float32", "float64")  # numbers that stand for themselves, without a scale
