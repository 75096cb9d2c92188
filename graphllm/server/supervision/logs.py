"""The log of a server's processes: everything goes to stderr, a line each, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from graphllm.config.server import ServerLogConfig


def start_log(config: ServerLogConfig, process: str = "") -> None:
    """Log to stderr. process: name of this one, for every line; "" for the only process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if config.log_format == "json" else _TextFormatter(process))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    # It says at info what our own lines say better, and stays for what goes wrong.
    logging.getLogger("uvicorn").setLevel(config.uvicorn_log_level.upper())
    logging.getLogger("graphllm.access").setLevel(
        logging.WARNING if config.disable_uvicorn_access_log else logging.NOTSET
    )


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
