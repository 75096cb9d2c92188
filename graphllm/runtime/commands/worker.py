"""Worker: what a user's function, and a command, see of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from graphllm.weights.loading.host_array import HostArray


@dataclass
class Worker:
    """The first argument of such a function: the rank that runs it, of ``world_size``.

    device: "cpu", or "cuda:1".
    in_order: runs something where kernels are launched from, on a CPU another thread, and waits for it.
    kept: for functions, which find there what they have put there before.
    """

    rank: int
    world_size: int
    device: str
    parameters: Mapping[str, torch.Tensor | HostArray]
    in_order: Callable[[Callable[[], Any]], Any]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, by the names that the model's file gives them, in the memory that kernels read. They
        may be written, with numbers of the same shape and dtype."""
        import torch  # an engine may run without

        return {
            name: weight
            if isinstance(weight, torch.Tensor)
            else torch.from_numpy(weight.numbers).view(getattr(torch, weight.dtype))
            for name, weight in self.parameters.items()
        }
