"""`Inputs`: the prompts that a command line of `graphllm run` names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Inputs:
    """file: .txt, .jsonl, "-" for stdin, or None.
    prompts: of the command line.
    raw: prompts do not go through the chat template.
    system: system message for prompts.
    output: file for results; None for the terminal.
    """

    file: str | None
    prompts: list[str]
    raw: bool
    system: str | None
    output: Path | None
