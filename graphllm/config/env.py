"""The environment variables of graphllm, read in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Env:
    """The environment variables graphllm knows, read once by the command line and passed down as this value."""

    cache_dir: Path

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Env:
        """GRAPHLLM_CACHE, else XDG_CACHE_HOME/graphllm, else ~/.cache/graphllm."""
        explicit = environ.get("GRAPHLLM_CACHE")
        base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Env(cache_dir=Path(explicit) if explicit else Path(base) / "graphllm")
