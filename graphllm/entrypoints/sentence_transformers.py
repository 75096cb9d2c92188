"""What sentence-transformers' files in a checkpoint folder say about how vectors are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphllm.config import ConfigError
from graphllm.config.fields import read_json

_LAST = "pooling_mode_lasttoken"


def check_last_token(folder: Path) -> None:
    """Raise ConfigError when ``1_Pooling/config.json`` asks for anything but the last token's vector, or when there
    are modules behind it that change it. A folder without these files passes."""
    found: dict[str, Any] = read_json(folder / "1_Pooling" / "config.json") or {}
    modes = {name for name, on in found.items() if name.startswith("pooling_mode_") and on is True}
    if modes - {_LAST}:
        raise ConfigError(
            f"1_Pooling/config.json: {', '.join(sorted(modes))} is not supported; use a checkpoint with {_LAST}"
        )
    if more := sorted(p.name for p in folder.glob("[0-9]_Dense")):
        raise ConfigError(f"{more[0]}: a dense layer behind pooling is not supported; use a checkpoint without one")
