"""Random parameters in the place of a checkpoint's, for benchmarks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from graphllm.host.libraries import Libraries
from graphllm.weights.encodings import Encoding, encoding_of
from graphllm.weights.loading.loader import allocate
from graphllm.weights.plan.evaluate import each, evaluate
from graphllm.weights.plan.expr import Concat, Each, Encode, Expr, Read, Slice, Stack, walk
from graphllm.weights.plan.plan import WeightPlan
from graphllm.weights.plan.simplify import at_rank, simplify

# A CPU draws only some 50 million normal numbers a second: random weights there repeat one block of them, each tensor
# from a start of its own. The length is prime, so that the rows of a matrix all differ.
_BLOCK = 1_048_573
_SHIFTS = 1 << 14


def random_weights(
    plan: WeightPlan,
    device: str | torch.device = "cpu",
    seed: int = 0,
    libraries: Libraries | None = None,
    rank: int = 0,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Normal numbers with deviation 0.02, norms are ones, computed ones are what the plan says; encoded ones stand for
    such numbers, and functions are of such numbers.

    libraries: see `load_weights`.
    rank: of a parallel group. What ranks divide is different on each, what all have is the same on all.
    into: memory to fill; None: it is allocated.
    """
    device = torch.device(device)
    noise = _Noise(device)
    tensors = allocate(plan, device) if into is None else {e.name: into[e.name] for e in plan}
    matrices: dict[tuple[str, Expr], dict[str, Tensor]] = {}
    for e in plan:
        tensor = tensors[e.name]
        if e.tie:
            continue
        if not any(isinstance(part, Read) for part in walk(e.expr)):  # computed: nothing of a checkpoint is in it
            tensor.copy_(evaluate(simplify(at_rank(e.expr, rank)), lambda region: torch.empty(0)))
            continue
        noise.seed(seed, e.name, rank if _is_divided(e.expr) else None)
        encoded = list(_encoded(e.expr, tensor))
        if encoded:
            for part, target in encoded:
                matrices.setdefault((part.encoding, part.matrix), {})[part.part] = target
        elif len(e.shape) == 1 and "norm" in e.name and "bias" not in e.name:
            tensor.fill_(1.0)
        else:
            noise.fill(tensor)
            if isinstance(made := simplify(e.expr), Each):  # decays of noise would grow
                tensor.copy_(each(made.function, tensor))
    for (name, matrix), parts in matrices.items():
        rows, inner = matrix.shape
        noise.seed(seed, str(matrix), rank if _is_divided(matrix) else None)
        _fill_encoded(encoding_of(name), parts, rows, inner, noise, libraries)
    return tensors


def _is_divided(expr: Expr) -> bool:
    """Whether ranks have parts of their own."""
    return any(isinstance(part, Slice) and part.per_rank for part in walk(expr))


class _Noise:
    """Normal numbers with deviation 0.02."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._device, self._on_cpu = device, device.type == "cpu"
        length = _BLOCK + _SHIFTS if self._on_cpu else 0
        self._block = torch.empty(length, device=device).normal_(0.0, 0.02, generator=self._generator)

    def seed(self, *of: object) -> None:
        """What is drawn from here on depends on ``of`` alone."""
        digest = hashlib.sha256(" ".join(map(str, of)).encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:7]))

    def fill(self, tensor: Tensor) -> None:
        """Any tensor: integers get random bits."""
        if not tensor.dtype.is_floating_point:
            bits = tensor.view(torch.uint8) if tensor.dim() else tensor
            bits.random_(0, 2 if tensor.dtype == torch.bool else 256, generator=self._generator)
        elif self._on_cpu:
            start = self._start()
            for part in tensor.view(-1).split(_BLOCK):
                part.copy_(self._block[start : start + len(part)])
        elif tensor.itemsize > 1:
            tensor.normal_(0.0, 0.02, generator=self._generator)
        else:  # torch draws none of 8 bits
            tensor.copy_(self.matrix(1, tensor.numel()).view(tensor.shape))

    def matrix(self, rows: int, inner: int) -> Tensor:
        """A float32 matrix."""
        start = self._start() if self._on_cpu else 0
        if rows * inner <= len(self._block) - start:
            return self._block[start : start + rows * inner].view(rows, inner)
        return torch.empty(rows, inner, device=self._device).normal_(0.0, 0.02, generator=self._generator)

    def _start(self) -> int:
        return int(torch.randint(_SHIFTS, (), generator=self._generator))


def _encoded(expr: Expr, dst: Tensor) -> Iterator[tuple[Encode, Tensor]]:
    """The parts of encoded matrices that an entry consists of, where their encoding can be made of numbers."""
    if isinstance(expr, Encode) and encoding_of(expr.encoding).writes:
        yield expr, dst
    elif isinstance(expr, Stack):
        for part, into in zip(expr.parts, dst, strict=True):
            yield from _encoded(part, into)
    elif isinstance(expr, Concat):
        at = 0
        for part in expr.parts:
            extent = part.shape[expr.dim]
            yield from _encoded(part, dst.narrow(expr.dim, at, extent))
            at += extent


def _fill_encoded(
    encoding: Encoding, parts: dict[str, Tensor], rows: int, inner: int, noise: _Noise, libraries: Libraries | None
) -> None:
    """The first rows are random, at most as many as there is noise for, and the others repeat them."""
    unit = encoding.block[0]
    some = min(rows, max(1, _BLOCK // inner // unit) * unit)
    made = encoding.encoded(noise.matrix(some, inner), libraries)
    for name, dst in parts.items():
        where = encoding.along(encoding.part(name), 0, (rows, inner)) if some < rows else None
        if where is None:
            dst.copy_(made[name])
            continue
        for part in dst.split(made[name].shape[where[0]], where[0]):
            part.copy_(made[name].narrow(where[0], 0, part.shape[where[0]]))
