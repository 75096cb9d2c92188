"""The memory that tensors of this process hold."""

from __future__ import annotations

import gc

import torch


def storages() -> list[torch.UntypedStorage]:
    """The memory of all tensors, each once."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors = [tensor for tensor in found if tensor.layout == torch.strided]  # others have none of their own
    return list({id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def storages_since(before: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """The memory that is there now, but was not when `storages` gave ``before``."""
    known = set(map(id, before))
    return [storage for storage in storages() if id(storage) not in known]
