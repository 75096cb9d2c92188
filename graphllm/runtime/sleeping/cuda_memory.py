"""A GPU's memory that an engine gives back while it sleeps: regions of virtual memory, as torch's tensors.

Weights of level 1 are copied to registered memory of the host, which stays for the next sleep of level 1; a sleep of
level 2 gives it back. Tables of adapters are copied at every level, because no file of the model has them. The cache
and what steps have between their kernels come back as zeros, as they were at the start.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from graphllm.config import ConfigError
from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.runtime.cuda.virtual_memory import Region, VirtualMemory
from graphllm.runtime.memory.torch_memory import TorchMemory
from graphllm.runtime.sleeping.host_copy import HostCopy
from graphllm.runtime.sleeping.rank_sleep import CACHE, KEPT, WEIGHTS

_ALIGN = 512  # bytes, as torch aligns what it allocates on a GPU
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: a stream that does not wait for the others
_AT_ONCE = 1 << 30  # bytes of one copy


class CudaSleepMemory(TorchMemory):
    """Memory of an executor, see `Memory`, that sleeps, see `SleepMemory`.

    driver: the CUDA driver.
    shares: other ranks may read what steps hand on, through a library that keeps hold of its memory. That part stays.
    """

    def __init__(self, device: torch.device, driver: CudaDriver, shares: bool = False) -> None:
        super().__init__(device)
        self._driver, self._shares = driver, shares
        number = device.index
        if number is None:
            number = torch.cuda.current_device() if device.type == "cuda" else 0
        torch.zeros(1, device=device)  # the device's context is the calling thread's from here on
        self._virtual = VirtualMemory(driver, number)
        self._stream = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self._copy: HostCopy | None = None
        self._saved: dict[int, int] = {}  # place in the copy, by the address of a region

    # Memory

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """In a region of its own, which sleeps with the cache."""
        count = math.prod(shape)
        kind = getattr(torch, dtype)
        return self._bytes(count * kind.itemsize, CACHE).view(kind)[:count].view(*shape)

    def scratch(self, nbytes: int) -> torch.Tensor:
        return super().zeros((nbytes,), "uint8") if self._shares else self.zeros((nbytes,), "uint8")

    def parameters(self, wanted: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, torch.Tensor]:
        """Zeros for parameters, in one region that sleeps with the weights. wanted: shape and dtype by name."""
        places, end = dict[str, tuple[int, int]](), 0
        for name, (shape, dtype) in wanted.items():
            nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
            places[name] = end, nbytes
            end += -(-nbytes // _ALIGN) * _ALIGN
        block = self._bytes(end, WEIGHTS)
        return {
            name: block[at : at + nbytes].view(getattr(torch, wanted[name][1])).view(*wanted[name][0])
            for name, (at, nbytes) in places.items()
        }

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the numbers of tensors that `zeros` gave come back after every sleep."""
        places = {tensor.data_ptr() for tensor in tensors}
        for region in self._virtual.regions:
            if region.address in places:
                region.tag, region.kept = WEIGHTS, True

    def _bytes(self, nbytes: int, tag: str) -> torch.Tensor:
        try:
            region = self._virtual.region(max(1, nbytes), tag)
        except CudaError as failure:
            raise RuntimeError(f"{nbytes / 1e9:.1f} GB: {failure}") from failure
        return self._tensor(region)

    def _tensor(self, region: Region) -> torch.Tensor:
        return torch.as_tensor(region, device=self.device)

    # SleepMemory

    def save(self, level: int) -> None:
        regions = [r for r in self._virtual.regions if r.tag == WEIGHTS and (r.kept or level == KEPT)]
        nbytes = sum(region.nbytes for region in regions)
        if self._copy is not None and self._copy.nbytes != nbytes:
            self._copy.close()
            self._copy = None
        if nbytes and self._copy is None:
            try:
                self._copy = HostCopy(self._driver, nbytes)
            except (MemoryError, CudaError) as failure:
                raise ConfigError(
                    f"memory: the host has no {nbytes / 1e9:.1f} GB for the weights ({failure}); free some, or use "
                    "level 2"
                ) from failure
        self._saved, at = {}, 0
        for region in regions:
            self._saved[region.address] = at
            for start, count in _parts(0, region.nbytes):
                self._to_host(at + start, region.address + start, count)
            at += region.nbytes
        self.finish()

    def unmap(self, tag: str, level: int) -> None:
        self._driver.call("cuCtxSynchronize")
        for region in self._virtual.regions:
            if region.tag == tag:
                region.unmap()

    def map(self, tag: str, level: int) -> None:
        for region in self._virtual.regions:
            if region.tag != tag:
                continue
            try:
                for address, nbytes in region.map():
                    self._fill(region, address, nbytes)
            except CudaError as failure:
                raise ConfigError(
                    f"memory: the GPU has no {region.nbytes / 1e9:.1f} GB left for {tag} ({failure}); free some, then "
                    "wake up again"
                ) from failure

    def finish(self) -> None:
        self._driver.call("cuStreamSynchronize", self._stream)

    def _fill(self, region: Region, address: int, nbytes: int) -> None:
        """Copy what was saved of a piece that has memory again, or make it zero."""
        start = address - region.address
        if region.address not in self._saved:
            self._driver.call(
                "cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(), ctypes.c_size_t(nbytes), self._stream
            )
            return
        assert self._copy is not None
        for at, count in _parts(start, min(nbytes, region.nbytes - start)):
            source = ctypes.c_void_p(self._copy.address + self._saved[region.address] + at)
            place = ctypes.c_uint64(region.address + at)
            self._driver.call("cuMemcpyHtoDAsync_v2", place, source, ctypes.c_size_t(count), self._stream)

    def _to_host(self, at: int, address: int, nbytes: int) -> None:
        assert self._copy is not None
        place = ctypes.c_void_p(self._copy.address + at)
        self._driver.call(
            "cuMemcpyDtoHAsync_v2", place, ctypes.c_uint64(address), ctypes.c_size_t(nbytes), self._stream
        )


def _parts(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Starts and bytes of copies."""
    for at in range(start, start + nbytes, _AT_ONCE):
        yield at, min(_AT_ONCE, start + nbytes - at)
