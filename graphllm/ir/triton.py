"""Launches of Triton kernels: run as they are, or one node of a graph under a tracer.

The node says everything that the kernel is compiled from, so nothing has to read the kernel, or run it, to compile it
(`graphllm.compile.codegen.cubins`).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

TRITON_NAMESPACE = "graphllm_triton"
GRID = ["grid_x", "grid_y", "grid_z"]  # names of the numbers of programs
_ALIGNED = 16  # bytes: where Triton's kernels take longer loads
_library = torch.library.Library(TRITON_NAMESPACE, "FRAGMENT")
_kernels: dict[str, Any] = {}


class TritonCall(NamedTuple):
    """What is known of a launch when a graph is made. What the kernel writes is not: it may be any of its tensors.

    kernel: see `triton_kernel`. tensors, numbers: names of the arguments that are tensors and integers, in the node's
    order. unaligned: tensors that need not begin at a multiple of 16 bytes. fixed: the other arguments,
    and options of Triton's compiler.
    """

    kernel: str
    tensors: list[str]
    numbers: list[str]
    unaligned: list[str]
    fixed: dict[str, Any]

    @staticmethod
    def of(text: str) -> TritonCall:
        """Of a node's last argument."""
        return TritonCall(*json.loads(text))


def triton_kernel(name: str) -> Any:
    """The kernel of that name, made of its module and function. Its launch was recorded in this process."""
    return _kernels[name]


def changing(call: TritonCall) -> list[str]:
    """Names of the arguments that a launch hands over, in the kernel's order."""
    return [
        p.name
        for p in triton_kernel(call.kernel).params
        if not p.is_constexpr and call.fixed.get(p.name, 0) is not None
    ]


def starts_early(kernel: Any) -> bool:
    """Whether it waits on the device for the kernel before it, so that it may be started while that one runs."""
    return "gdc_wait" in kernel.src


def launch_triton(kernel: Any, grid: tuple[Any, ...], *args: Any, **kwargs: Any) -> None:
    """Start a Triton kernel so that tracers record it; runs it directly otherwise (also under TRITON_INTERPRET=1).

    A kernel that `starts_early` does so here, as in an artifact. With tensors on "meta" it is only compiled, into
    Triton's cache. Raises TypeError where it cannot be recorded: under triton.autotune, or with a constant that JSON
    does not hold.
    """
    if type(kernel).__name__ == "InterpretedFunction":
        kernel[grid](*args, **kwargs)
    elif any(isinstance(a, FakeTensor) for a in args):
        _record(kernel, grid, args, kwargs)
    else:
        early = starts_early(kernel)
        if any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
            kernel.warmup(*args, grid=grid, launch_pdl=early, **kwargs)
            return
        give_scratch()
        kernel[grid](*args, launch_pdl=early, **kwargs)


def give_scratch() -> None:
    """Before every launch: Triton asks a function for the memory in which kernels build descriptors, and each of
    Inductor's kernels that runs in this process has another one asked from then on. An artifact has its own memory."""
    import triton

    triton.set_allocator(_scratch)


def _scratch(size: int, align: int, stream: int | None) -> Tensor:
    """Not what the last launch of that size on the stream has: that one may still run. It lets no third one begin."""
    return next(_in_turn(size, stream))


@functools.cache
def _in_turn(size: int, stream: int | None) -> Iterator[Tensor]:
    return itertools.cycle([torch.empty(size, dtype=torch.int8, device="cuda") for _ in range(2)])


def _record(kernel: Any, grid: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not hasattr(kernel, "params"):
        raise TypeError(f"{kernel} is not made by triton.jit only; tune its constants by the implementation's configs=")
    defaults = {n: p.default for n, p in kernel.signature.parameters.items() if p.default is not p.empty}
    given = {**defaults, **dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    arguments = {p.name for p in kernel.params if not p.is_constexpr}
    tensors = {n: v for n, v in given.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in given.items() if n in arguments and type(v) in (int, torch.SymInt)}
    fixed = {n: v for n, v in given.items() if n not in tensors and n not in numbers}
    unaligned = [n for n, t in tensors.items() if not _aligned(t)]
    call = TritonCall(_named(kernel), list(tensors), list(numbers), unaligned, fixed)
    whole = [*grid, *[1] * (3 - len(grid))]
    torch.ops.graphllm_triton.launch(
        list(tensors.values()), list(numbers.values()), whole, json.dumps(call, default=_made_fixed)
    )


def _named(kernel: Any) -> str:
    """The kernel's name for `triton_kernel`, with a number after it where the function was defined again."""
    own = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    names = itertools.chain([own], (f"{own}_{number}" for number in itertools.count(2)))
    return next(name for name in names if _kernels.setdefault(name, kernel) is kernel)


def _aligned(tensor: Tensor) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports much, which serving does without

    return statically_known_true(tensor.storage_offset() * tensor.element_size() % _ALIGNED == 0)


def _made_fixed(constant: Any) -> int | bool:
    """A size as a constant is the same from then on: lowering refuses that where it is dynamic. What a comparison of
    sizes says holds for the whole bucket."""
    if isinstance(constant, torch.SymInt):
        return int(constant)
    if isinstance(constant, torch.SymBool):
        return bool(constant)
    raise TypeError(f"a constant of a Triton kernel is a number, a text or None, not {constant!r}")


def _run(tensors: Sequence[Tensor], numbers: Sequence[int], grid: Sequence[int], call: str) -> None:
    known = TritonCall.of(call)
    named = {**dict(zip(known.tensors, tensors, strict=True)), **dict(zip(known.numbers, numbers, strict=True))}
    launch_triton(triton_kernel(known.kernel), tuple(grid), **named, **known.fixed)


_library.define("launch(Tensor(a!)[] tensors, SymInt[] numbers, SymInt[] grid, str call) -> ()")
_library.impl("launch", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{TRITON_NAMESPACE}::launch", lambda *args: None, lib=_library)
