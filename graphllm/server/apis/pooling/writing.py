"""Vectors as answers write them."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np

from graphllm.weights.loading.host_array import bfloat16_bits

Order = Literal["=", "<", ">"]
"""Of bytes, as numpy writes it."""


def numbers(vector: np.ndarray) -> list[Any]:
    """As JSON numbers."""
    return vector.tolist()


def bytes_of(vector: np.ndarray, dtype: str = "float32", order: Order = "<") -> bytes:
    """All numbers, row by row. dtype: float32, float16 or bfloat16."""
    if dtype == "bfloat16":
        halves = bfloat16_bits(np.ascontiguousarray(vector, np.float32))
        return halves.astype(np.dtype("u2").newbyteorder(order)).tobytes()
    return np.ascontiguousarray(vector).astype(np.dtype(dtype).newbyteorder(order)).tobytes()


def base64_of(vector: np.ndarray, dtype: str = "float32", order: Order = "<") -> str:
    """The same as text."""
    return base64.b64encode(bytes_of(vector, dtype, order)).decode()


def bits(vector: np.ndarray, signed: bool = False) -> list[int]:
    """One bit for each number, 1 where it is above 0, eight in a byte, the first one highest. signed: bytes less 128,
    as Cohere's "binary" has them."""
    packed = np.packbits(vector > 0)
    return (packed.astype(np.int16) - 128 if signed else packed).tolist()
