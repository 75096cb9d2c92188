"""Copies of offloaded weights from the host's memory to the device, in order with what a step launches."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class WeightCopies(Protocol):
    """Copies by their numbers; a number may come again in a later step."""

    def begin(self, number: int, target: Tensor, source: Tensor) -> None:
        """Copy, once what was launched so far has ended."""

    def wait(self, number: int) -> None:
        """Have what is launched from here on wait for the copy."""


class CpuCopies:
    """Of a CPU: at once."""

    def begin(self, number: int, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def wait(self, number: int) -> None:
        """It has ended."""


class CudaCopies:
    """Of a GPU: in a stream of their own, which forks from the current one and joins it by events. So a CUDA graph that
    is captured meanwhile has them as nodes. Sources lie in registered memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._ended: dict[int, torch.cuda.Event] = {}

    def begin(self, number: int, target: Tensor, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._ended[number] = self._stream.record_event()

    def wait(self, number: int) -> None:
        torch.cuda.current_stream().wait_event(self._ended[number])
