"""Rows of x as the kernels of quantized weights round them, in float64, and the levels that they are compiled for."""

from __future__ import annotations

import numpy as np
import torch

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-3, torch.float16: 5e-4}
MANY = 32  # rows of x from which on AMX takes them as they are, and weights become bfloat16


def rounded_x(x: torch.Tensor, group: int) -> np.ndarray:
    """x with every group of its entries rounded to multiples of a 127th of the largest."""
    numbers = x.float().numpy()
    out = np.empty(numbers.shape)
    for start in range(0, numbers.shape[1], group):
        part = numbers[:, start : start + group]
        largest = np.abs(part).max(1, keepdims=True)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        scaled = (part * inverse).astype(np.float64)
        out[:, start : start + group] = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5) * (largest / 127.0)
    return out


def gated(halves: np.ndarray) -> np.ndarray:
    """silu(gate) times the value, of rows that are a gate and a value half."""
    gate, value = np.split(halves, 2, axis=1)
    return np.asarray(gate / (1 + np.exp(-gate)) * value)
