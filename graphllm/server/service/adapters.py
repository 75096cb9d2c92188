"""Adapters that are served with the model, by the names that requests give in their field "model"."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import msgspec

from graphllm.config import ConfigError

RESOLVERS = "graphllm.lora_resolvers"  # entry points: functions from a name to the folder of an adapter, or None


class ServedAdapter(msgspec.Struct, frozen=True):
    """path: folder of its files."""

    name: str
    path: str


class Adapters(Protocol):
    """Of one server, in all of its processes."""

    async def all(self) -> list[ServedAdapter]:
        """In the order in which they came."""
        ...

    async def find(self, name: str) -> ServedAdapter | None: ...

    async def put(self, adapter: ServedAdapter) -> None:
        """Serve it, in the place of one of its name."""
        ...

    async def remove(self, name: str) -> bool:
        """Serve it no more; False where there is none."""
        ...


class OwnAdapters:
    """In the memory of one process."""

    def __init__(self, given: Iterable[ServedAdapter]) -> None:
        self._found = {adapter.name: adapter for adapter in given}

    async def all(self) -> list[ServedAdapter]:
        return list(self._found.values())

    async def find(self, name: str) -> ServedAdapter | None:
        return self._found.get(name)

    async def put(self, adapter: ServedAdapter) -> None:
        self._found[adapter.name] = adapter

    async def remove(self, name: str) -> bool:
        return self._found.pop(name, None) is not None


def parse_modules(given: Sequence[str], names: Sequence[str]) -> tuple[ServedAdapter, ...]:
    """Adapters from ``name=path``, or from JSON with name and path. names: of the model itself. Raises ConfigError."""
    found: list[ServedAdapter] = []
    for text in given:
        name, _, path = text.partition("=")
        if text.startswith("{"):
            try:
                fields = json.loads(text)
                name, path = str(fields["name"]), str(fields["path"])
            except (ValueError, KeyError) as damage:
                raise ConfigError(f"lora-modules: {text!r:.80}: give name=path, or JSON with name and path") from damage
        if not name or not path:
            raise ConfigError(f"lora-modules: {text!r:.80}: give name=path, or JSON with name and path")
        if name in names or name in {adapter.name for adapter in found}:
            raise ConfigError(f"lora-modules: the name {name!r} is given twice; give another one")
        found.append(ServedAdapter(name, str(Path(path).expanduser().resolve())))
    return tuple(found)


def inside(folder: str, path: str) -> str:
    """An adapter's folder, which is ``folder`` or lies under it; a relative path begins there. Raises ConfigError."""
    root = Path(folder).resolve()
    found = (root / path).resolve()
    if not found.is_relative_to(root):
        raise ConfigError(f"lora_path is {path!r:.80}: give a folder in the server's --lora-dir")
    return str(found)


def resolvers() -> list[Callable[[str], str | None]]:
    """Those that packages offer."""
    return [entry.load() for entry in entry_points(group=RESOLVERS)]
