"""The user's text as sequences of tokens: some to calibrate with, some to measure with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphllm.config import ConfigError

# What is measured with where there is no text of the user's.
SAMPLE = """\
A river begins as rain on high ground. The water runs together in small streams, the streams meet, and by the time the
river reaches the plain it is wide and slow. People have always lived beside it: it carries boats, turns mills and
waters the fields. In spring, when the snow melts in the mountains, it may leave its bed and flood the meadows.

Question: A train leaves at 9:15 and arrives at 11:45. How long does the journey take?
Answer: From 9:15 to 11:15 are two hours, and from 11:15 to 11:45 are 30 minutes. It takes two and a half hours.

def mean(numbers):
    total = 0
    for number in numbers:
        total += number
    return total / len(numbers)

{"name": "Ada", "age": 36, "languages": ["English", "French"], "address": {"city": "London", "street": null}}
"""


class Text(NamedTuple):
    """Sequences of token ids. name: what people call the held-out ones."""

    calibration: list[Tensor]
    held_out: list[Tensor]
    name: str


def read_text(file: Path | None, tokenizer: Any, count: int, length: int) -> Text:
    """The first ``count`` sequences of at most ``length`` tokens of a file: of each line of .jsonl (text, prompt or
    messages), else pieces of the whole text. Every tenth one is held out, at least one. Raises ConfigError naming what
    is wrong with the file."""
    if file is None:
        return Text([], [_ids(tokenizer, SAMPLE)[:length]], "a sample text of graphllm's")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8"
        raise ConfigError(f"calibration: {file} cannot be read ({reason}); give a text or .jsonl file") from failure
    if file.suffix == ".jsonl":
        lines = [n for n in enumerate(text.splitlines(), 1) if n[1].strip()]
        pieces = [_ids(tokenizer, _line(file, *line, tokenizer))[:length] for line in lines[:count]]
    else:
        ids = _ids(tokenizer, text)[: count * length]
        if len(ids) < 2 * length:
            length = max(2, len(ids) // 2)
        pieces = list(ids.split(length))
    pieces = [p for p in pieces if len(p) > 1]
    if len(pieces) < 2:
        raise ConfigError(
            f"calibration: {file} has {len(pieces)} sequences of tokens; give several paragraphs, or lines of .jsonl"
        )
    held = [p for i, p in enumerate(pieces) if i % 10 == 1]
    return Text([p for i, p in enumerate(pieces) if i % 10 != 1], held, str(file))


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text).input_ids, dtype=torch.int64)


def _line(file: Path, number: int, line: str, tokenizer: Any) -> str:
    """The text of a line of .jsonl."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict):
        for field in ("text", "prompt"):
            if isinstance(found.get(field), str):
                return str(found[field])
        if isinstance(found.get("messages"), list):
            return str(tokenizer.apply_chat_template(found["messages"], tools=found.get("tools"), tokenize=False))
    raise ConfigError(f"calibration: line {number} of {file} is not an object with text, prompt or messages")
