"""Process groups by name: what collective ops of a graph run in. A process joins them at its start
(`graphllm.runtime.groups`); without, every group has this process alone."""

from __future__ import annotations

from typing import Any

TENSOR = "tensor"  # the ranks that hold one model together

_groups: dict[str, Any] = {}


def set_group(name: str, group: Any) -> None:
    """Make a ``torch.distributed`` process group known; None forgets it."""
    if group is None:
        _groups.pop(name, None)
    else:
        _groups[name] = group


def group_of(name: str) -> Any:
    """The process group of that name, None for this process alone."""
    return _groups.get(name)
