"""What an executor opens: kernels with the stream that they run in, memory, and things that only some models have.

Torch is imported here late, because a CPU may have no need of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphllm.program.artifact import Artifact
from graphllm.program.schema import ExpertLayout
from graphllm.runtime.cuda.functions import CudaFunctions
from graphllm.runtime.kernels import CpuKernels, CudaKernels, Kernels
from graphllm.runtime.memory.memory import HostMemory, Memory
from graphllm.runtime.stream import CpuStream, CudaStream, Stream

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.expert_slots import ExpertSlots


def open_kernels(
    artifact: Artifact, memory: Memory, threads: int | None, functions: CudaFunctions | None
) -> tuple[Kernels, Stream]:
    """The kernels of an artifact's pieces, and a stream. threads: of a CPU's kernels. functions: the kernels of a GPU,
    if loading them has begun."""
    if memory.device.type == "cuda":
        stream = CudaStream()
        return CudaKernels(functions or CudaFunctions(artifact.pieces), stream.handle), stream
    kernels = CpuKernels(artifact.libraries)
    if isinstance(memory, HostMemory):
        return kernels, CpuStream(threads or kernels.threads, kernels.set_threads)
    import torch

    return kernels, CpuStream(threads or torch.get_num_threads())


def torch_memory(device: str) -> Memory:
    """Torch's memory on a device."""
    import torch

    from graphllm.runtime.memory.torch_memory import TorchMemory

    return TorchMemory(torch.device(device))


def exchange(device: str, ranks: int) -> torch.Tensor | None:
    """Addresses of the memory that tensor-parallel ranks share. One rank needs none, even in a process that is a rank
    of another engine."""
    if device == "cpu" or ranks == 1:
        return None
    from graphllm.ir.groups import TENSOR, group_of

    return group_of(TENSOR, ranks).exchange


def expert_slots(
    layout: ExpertLayout | None, weights: Mapping[str, torch.Tensor], device: torch.device
) -> ExpertSlots | None:
    """What moves experts; None for a layout without."""
    if layout is None:
        return None
    from graphllm.runtime.expert_slots import ExpertSlots

    return ExpertSlots(layout, weights, device)


def reserve_links(stages: int, sizes: tuple[int, ...]) -> None:
    """Make room for the messages between the stages of a pipeline."""
    from graphllm.ir.groups import links_of

    links_of(stages).reserve(*sizes)


def give_back() -> None:
    """Return a GPU's free memory."""
    import torch

    torch.cuda.empty_cache()
