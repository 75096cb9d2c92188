"""Whether a checkpoint has a language head of its own, although its config.json ties the head to the embedding."""

from __future__ import annotations

from collections.abc import Mapping

from graphllm.weights.checkpoint.files import opened, read_into
from graphllm.weights.checkpoint.tensor_info import TensorInfo

HEAD = "lm_head.weight"
_CHUNK = 1 << 24  # bytes


def has_own_head(tensors: Mapping[str, TensorInfo], prefix: str = "") -> bool:
    """Whether the head differs from every tensor of its shape, such as the embedding. It is False where
    either of the two is not there. prefix: before the names of a draft model's tensors."""
    head = tensors.get(prefix + HEAD)
    if head is None:
        return False
    others = [t for n, t in tensors.items() if n.startswith(prefix) and t is not head and t.shape == head.shape]
    return bool(others) and not any(same_bytes(head, other) for other in others)


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two stored tensors have the same dtype and the same bytes."""
    if (one.dtype, one.nbytes) != (other.dtype, other.nbytes):
        return False
    buffers = [memoryview(bytearray(min(_CHUNK, one.nbytes))) for _ in range(2)]
    with opened({one.file, other.file}) as fds:
        for at in range(0, one.nbytes, _CHUNK):
            size = min(_CHUNK, one.nbytes - at)
            for buffer, tensor in zip(buffers, (one, other), strict=True):
                read_into(buffer[:size], tensor.file, fds[tensor.file], tensor.offset + at)
            if buffers[0][:size] != buffers[1][:size]:
                return False
    return True
