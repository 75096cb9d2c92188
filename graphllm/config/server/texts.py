"""Settings of a server that users write as a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from graphllm.config.errors import ConfigError


def parse_words(name: str, text: str) -> tuple[str, ...]:
    """The words of a JSON list, or of a text with commas. name: of the setting. Raises ConfigError."""
    if not text.startswith("["):
        return tuple(text.split(","))
    try:
        return tuple(map(str, json.loads(text)))
    except ValueError as damage:
        raise ConfigError(f"{name} is {text!r:.80}: no JSON ({damage}); give a list of texts") from damage


def parse_root_path(given: str) -> str:
    """A path without a slash at its end. Raises ConfigError."""
    path = given.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path):
        raise ConfigError(f"root-path is {given!r:.80}: give a path such as /models/chat")
    return path


def parse_folder(given: str) -> str:
    """A folder of adapters. Raises ConfigError where there is none."""
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"lora-dir is {given!r:.80}: no folder; give the folder of the adapters that requests may load"
        )
    return str(folder)


def parse_template(given: str) -> str:
    """A chat template: a file, or the text itself. Raises ConfigError for a file that cannot be read."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise ConfigError(f"chat-template is {given!r:.80}: no file that can be read, and no template") from reason


def parse_kwargs(given: str) -> dict[str, Any]:
    """Variables of chat templates, as JSON. Raises ConfigError."""
    try:
        found = json.loads(given or "{}")
    except ValueError as damage:
        raise ConfigError(f"default-chat-template-kwargs is {given!r:.80}: no JSON ({damage})") from damage
    if not isinstance(found, dict):
        raise ConfigError(f"default-chat-template-kwargs is {given!r:.80}: give a JSON object")
    return found
