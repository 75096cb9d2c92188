"""The C++ kernels of an attention op: one for each type of rows, and of the cache."""

from __future__ import annotations

from pathlib import Path

import torch

from graphllm.ir.kernels import CKernel

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


def kernels_of(op: str, schema: str, folder: Path) -> dict[tuple[torch.dtype, torch.dtype], CKernel]:
    """By the dtypes of rows and cache. Those of one dtype are in cpu.cpp, the others in cpu_small_cache.cpp."""

    def kernel(dtype: torch.dtype, cache: torch.dtype) -> CKernel:
        symbol = f"graphllm_{op}_{_SHORT[dtype]}"
        if dtype == cache:
            return CKernel(symbol, schema, folder / "cpu.cpp")
        return CKernel(f"{symbol}_{_SHORT[cache]}", schema, folder / "cpu_small_cache.cpp", usual=False)

    return {
        (dtype, cache): kernel(dtype, cache)
        for dtype in (torch.float32, torch.bfloat16)
        for cache in (dtype, torch.float8_e4m3fn, torch.int8)
    }
