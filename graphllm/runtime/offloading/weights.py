"""`OffloadedWeights`: parameters in the host's memory, and the buffers of the device that steps read them in.

Programs are bound to the buffers; `graphllm.program.offloading` says when a group is copied. Importing this imports no
torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphllm.config import ConfigError
from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.host.hugepages import zeros
from graphllm.program.offloading import BUFFERS, OFFLOADED, OffloadPlan, aligned, buffer_of
from graphllm.runtime.sleeping.host_copy import HostCopy

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.offloading.copies import WeightCopies

_TIMED = 4  # copies, at most, that tell the rate


class OffloadedWeights:
    """The parameters of a plan. Raises ConfigError where the host has no room.

    shapes: shape and dtype by name.
    device: it has the buffers.

    views: the parameters where steps read them, by name.
    host: the parameters where they stay, by name. What is written there, the next step reads.
    """

    def __init__(
        self, plan: OffloadPlan, shapes: Mapping[str, tuple[tuple[int, ...], str]], device: torch.device
    ) -> None:
        import torch

        from graphllm.runtime.offloading import copies

        self.plan, self.groups, self._device = plan, plan.groups, device
        self._buffers = [torch.zeros(plan.buffer, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._registered = _registered(plan.total) if device.type == "cuda" else None
        numbers = zeros(plan.total) if self._registered is None else self._registered.numbers
        self._copies: WeightCopies = copies.CudaCopies() if device.type == "cuda" else copies.CpuCopies()
        self.views: dict[str, torch.Tensor] = {}
        self.host: dict[str, torch.Tensor] = {}
        whole, start = torch.from_numpy(numbers), 0
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each group: on the device, on the host
        for number, (names, nbytes) in enumerate(zip(plan.groups, plan.sizes, strict=True)):
            target, source = self._buffers[buffer_of(number)][:nbytes], whole[start : start + nbytes]
            self._places.append((target, source))
            start += nbytes
            at = 0
            for name in names:
                shape, dtype = shapes[name]
                kind: torch.dtype = getattr(torch, dtype)
                size = kind.itemsize * math.prod(shape)
                for found, block in ((self.views, target), (self.host, source)):
                    found[name] = block[at : at + size].view(kind).view(shape)
                at += aligned(size)

    def begin(self, group: int) -> None:
        """Copy a group to its buffer, once what was launched so far has ended."""
        self._copies.begin(group, *self._places[group])

    def wait(self, group: int) -> None:
        """Have what is launched from here on wait for that copy."""
        self._copies.wait(group)

    def clear(self, group: int) -> None:
        """Zeros in the buffer of a group, which is then filled."""
        self._places[group][0].zero_()

    def keep(self, group: int) -> None:
        """Have on the host what is in the buffer of a group."""
        target, source = self._places[group]
        source.copy_(target)

    def rate(self) -> float:
        """Bytes a second of copies to the device, measured now. Nothing else runs."""
        some = range(min(_TIMED, len(self.groups)))
        self._copied(some)
        begun = time.perf_counter()
        self._copied(some)
        return sum(self.plan.sizes[group] for group in some) / (time.perf_counter() - begun)

    def _copied(self, groups: range) -> None:
        import torch

        for group in groups:
            self.begin(group)
            self.wait(group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def stored_parameters(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a rank where they stay. weights: the parameters where steps read them."""
    offloaded: OffloadedWeights | None = weights.get(OFFLOADED)
    if offloaded is None:
        return weights
    return {n: w for n, w in weights.items() if n != OFFLOADED} | offloaded.host


def _registered(nbytes: int) -> HostCopy:
    """Memory of the host that a GPU copies from by itself. Raises ConfigError."""
    try:
        return HostCopy(CudaDriver(), nbytes)
    except (MemoryError, OSError, CudaError) as failure:
        raise ConfigError(
            f"cpu_offload_gb: the host has no {nbytes / 2**30:.1f} GiB for weights ({failure}); give less"
        ) from failure
