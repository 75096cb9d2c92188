"""The log of a server's processes: everything goes to stderr, a line each, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Literal, NamedTuple


class LogOptions(NamedTuple):
    """http_level: of uvicorn. access: there is a line for each request."""

    form: Literal["text", "json"] = "text"
    level: str = "info"
    http_level: str = "warning"
    access: bool = True


def start_log(options: LogOptions, process: str = "") -> None:
    """process: name of this one, in every line; "" where there is one only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if options.form == "json" else _TextFormatter(process))
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    # It says at info what our own lines say better, and stays for what goes wrong.
    logging.getLogger("uvicorn").setLevel(options.http_level.upper())
    logging.getLogger("graphllm.access").setLevel(logging.NOTSET if options.access else logging.WARNING)


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process and process + ' '}%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        notes: dict[str, Any] = getattr(record, "notes", {})
        text = super().format(record)
        first, newline, rest = text.partition("\n")
        return " ".join([first, *(f"{k}={_value(v)}" for k, v in notes.items())]) + newline + rest


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **getattr(record, "notes", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _value(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in '"=' for c in text) else text
