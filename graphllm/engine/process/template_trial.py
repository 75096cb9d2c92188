"""Chat templates that come with requests: whoever sends one decides what runs, so it runs in a process of its own.

jinja2's sandbox keeps a template from everything but its variables. A loop of one line can take any time and memory, so
both are limited in that process.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from graphllm.config import ConfigError
from graphllm.engine.process.limited_process import LimitedProcess

CPU_SECONDS = 2
MEMORY_MB = 256
MAX_TEMPLATE, MAX_TEXT = 1 << 20, 16 << 20  # characters of a template, and of what it makes


class Question(msgspec.Struct):
    """A line to the process."""

    template: str
    variables: dict[str, Any]


class Rendered(msgspec.Struct):
    """A line of the process. wrong: what the template, or its author, has to say against the variables."""

    text: str = ""
    wrong: str = ""


class TemplateTrial:
    """Asks the process, which starts with the first template and stays. For several threads."""

    def __init__(self) -> None:
        self._process = LimitedProcess("graphllm.engine.process.template_worker", b"", "chat templates of requests")

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that the template makes. Raises ConfigError for what it refuses, and beyond the limits;
        QueueFullError when too many wait."""
        if len(template) > MAX_TEMPLATE:
            raise ConfigError(f"chat_template has {len(template)} characters: give at most {MAX_TEMPLATE}")
        answer = self._process.ask(msgspec.json.encode(Question(template, dict(variables))))
        if isinstance(answer, bytes):
            rendered = msgspec.json.decode(answer, type=Rendered)
            if rendered.wrong:
                raise ConfigError(f"chat_template: {rendered.wrong}")
            return rendered.text
        what = f"{CPU_SECONDS} s" if answer in (-signal.SIGXCPU, -signal.SIGKILL) else f"{MEMORY_MB} MiB"
        raise ConfigError(f"chat_template: takes more than {what}; give a simpler one")
