"""Vectors as answers write them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


def numbers(vector: np.ndarray) -> list[Any]:
    """As JSON numbers."""
    return vector.tolist()


def base64_of(vector: np.ndarray, dtype: Any = "<f4") -> str:
    """All numbers, row by row, as text. dtype: with its byte order."""
    return base64.b64encode(np.ascontiguousarray(vector).astype(dtype).tobytes()).decode()


def bits(vector: np.ndarray, signed: bool = False) -> list[int]:
    """One bit for each number, 1 where it is above 0, eight in a byte, the first one highest. signed: bytes less 128,
    as Cohere's "binary" has them."""
    packed = np.packbits(vector > 0)
    return (packed.astype(np.int16) - 128 if signed else packed).tolist()
