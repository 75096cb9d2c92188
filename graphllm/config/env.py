"""The environment variables of graphllm, read in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Env:
    """The environment variables graphllm knows, read once by the command line and passed down as this value.

    cache_dir: of artifacts and of what is made once. hub_cache: where models of the Hugging Face hub are, in its own
    variables. offline: nothing may be asked of the hub. optimize: what the setting of that name is where nobody says.
    """

    cache_dir: Path
    hub_cache: Path = Path()
    offline: bool = False
    optimize: str = "behind"

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Env:
        """The cache: GRAPHLLM_CACHE, else XDG_CACHE_HOME/graphllm, else ~/.cache/graphllm. Of the hub: HF_HUB_CACHE,
        else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub; HF_HUB_OFFLINE,
        TRANSFORMERS_OFFLINE. GRAPHLLM_OPTIMIZE."""
        base = Path(environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"))
        hub = Path(environ.get("HF_HOME") or base / "huggingface") / "hub"
        offline = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
        return Env(
            cache_dir=Path(environ.get("GRAPHLLM_CACHE") or base / "graphllm"),
            hub_cache=Path(environ.get("HF_HUB_CACHE") or hub).expanduser(),
            offline=offline.upper() in ("1", "ON", "YES", "TRUE"),
            optimize=environ.get("GRAPHLLM_OPTIMIZE") or "behind",
        )
