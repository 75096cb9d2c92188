"""`LoRARequest`, and the adapter that the engine core gets for it. An adapter's files are checked here, once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError
from graphllm.engine.requests.request import Adapter, CoreInfo
from graphllm.program.artifact import Artifact
from graphllm.weights.adapters.adapted import linear_from
from graphllm.weights.adapters.adapters import adapter_digest, check_adapter


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a request is answered with.

    lora_name: for people, and the model's name in an API.
    lora_int_id: changes nothing; the contents of its files identify an adapter.
    lora_path: folder in PEFT's format.
    base_model_name, load_inplace: change nothing; files that have changed are another adapter.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ConfigError(f"lora_name is {self.lora_name!r:.80}: give a text")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise ConfigError(f"lora_path is {self.lora_path!r:.80}: give the folder of the adapter {self.lora_name!r}")


class AdapterFiles:
    """Adapters that were opened for one core. dtype: of the artifact's tables."""

    def __init__(self, info: CoreInfo) -> None:
        self._info = info
        self._opened: dict[tuple[str, str], tuple[list[Any], Adapter]] = {}

    def open(self, name: str, path: str | Path) -> Adapter:
        """The adapter in a folder, read and checked unless its files are as they were. Raises ConfigError naming what
        this engine cannot serve of it."""
        if not self._info.adapted:
            raise ConfigError(f"adapter {name!r}: adapters are not served; start with --enable-lora (enable_lora=True)")
        folder = Path(path).expanduser().resolve()
        seen = _signature(folder)
        known = self._opened.get((name, str(folder)))
        if known is None or known[0] != seen:
            digest = adapter_digest(folder)
            check_adapter(folder, self._info.adapted, self._info.max_lora_rank)
            self._opened[name, str(folder)] = known = (seen, Adapter(name, str(folder), digest))
        return known[1]

    def requested(self, given: LoRARequest | None) -> Adapter | None:
        """The adapter of a request. Raises ConfigError."""
        if given is None:
            return None
        if not isinstance(given, LoRARequest):
            raise ConfigError(f"lora_request is {given!r:.80}: give a LoRARequest")
        return self.open(given.lora_name, given.lora_path)

    def each(self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[Adapter | None]:
        """One adapter for each of ``count`` prompts."""
        listed = list(given) if isinstance(given, Sequence) else [given] * count
        if len(listed) != count:
            raise ConfigError(
                f"lora_request has {len(listed)} entries and there are {count} prompts: give one for each"
            )
        return [self.requested(request) for request in listed]


def check_adapters(artifact: Artifact, given: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError for adapters (name, folder) that an engine with this artifact cannot serve."""
    if not given:
        return
    linears = [linear_from(plain) for plain in artifact.program.adapted]
    rank = artifact.config.max_lora_rank
    for name, folder in given:
        try:
            check_adapter(Path(folder), linears, rank)
        except ConfigError as mistake:
            raise ConfigError(f"adapter {name!r}: {mistake}") from mistake


def _signature(folder: Path) -> list[Any]:
    """Changes when a file of the folder does."""
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
    except OSError as problem:
        raise ConfigError(
            f"lora_path is {str(folder)!r}: {problem.strerror}; give the folder of an adapter"
        ) from problem
    return sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found)
