"""A device's memory as torch's tensors: of a GPU, and of a CPU on which torch computes, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from graphllm.host.hugepages import zeros


class TorchMemory:
    """See `graphllm.runtime.memory.memory.Memory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if self.device.type == "cuda":
            return torch.zeros(shape, dtype=kind, device=self.device)
        count = math.prod(shape)
        return torch.from_numpy(zeros(max(1, count) * kind.itemsize)).view(kind)[:count].view(*shape)

    def scratch(self, nbytes: int) -> torch.Tensor:
        return self.zeros((nbytes,), "uint8")

    def staging(self, nbytes: int, on_host: bool) -> torch.Tensor:
        if on_host:
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def wrapped(self, memory: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(memory)

    def typed(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        return array.view(getattr(torch, dtype))

    def shaped(self, array: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        return array.view(getattr(torch, dtype)).view(tuple(shape))

    def strided(self, array: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
        return array.as_strided(tuple(shape), tuple(stride), array.storage_offset() + offset)

    def on_host(self, array: torch.Tensor) -> np.ndarray | None:
        return None if self.device.type != "cpu" or array.dtype == torch.bfloat16 else array.numpy()

    def read_into(self, array: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        dtype = torch.float32 if array.dtype == torch.bfloat16 else array.dtype
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self.device.type == "cuda")

    def log_softmax(self, logits: torch.Tensor) -> Callable[[], np.ndarray]:
        found = torch.log_softmax(torch.nan_to_num(logits.float(), nan=-math.inf), dim=-1)
        return lambda: found.cpu().numpy()
