"""What a type checker knows of `EngineArgs` and of the keywords of `LLM`: ``args.pyi``; write it with
``python -m graphllm.config.stub > graphllm/config/args.pyi``."""

from __future__ import annotations

import collections.abc
import json
import re
import types
import typing
from typing import Any

from graphllm.config.engine import EngineConfig
from graphllm.config.setting import definitions

_HEAD = '''"""Generated from the definitions in graphllm/config/; `python -m graphllm.config.stub` prints it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, Unpack

from graphllm.config.compilation import Bucket

'''


def stub(config: type = EngineConfig) -> str:
    """The stub file. The first setting may be given without its name."""
    defined = definitions(config)
    said = {name: re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", _text(d.said)) for name, d in defined.items()}
    first, *_ = said
    keywords = "".join(f"    {name}: {kind}\n" for name, kind in said.items() if name != first)
    read = {name: _text(d.setting.written or d.type, d.unsaid is None) for name, d in defined.items()}
    fields = "".join(f"    {name}: {kind}\n" for name, kind in read.items())
    return (
        f"{_HEAD}class EngineSettings(TypedDict, total=False):\n{keywords}\n"
        f"class EngineArgs:\n    __dataclass_fields__: ClassVar[dict[str, Any]]\n{fields}"
        f"    def __init__(self, {first}: {said[first]} = ..., **settings: Unpack[EngineSettings]) -> None: ...\n"
        "    @staticmethod\n    def add_cli_args(parser: ArgumentParser) -> ArgumentParser: ...\n"
        "    @classmethod\n    def from_cli_args(cls, args: Namespace) -> EngineArgs: ...\n\n"
        'def args_class(config: type, name: str = "EngineArgs") -> type: ...\n'
    )


def _text(annotation: Any, optional: bool = False) -> str:
    """A type as it is written. optional: the value may be None, too."""
    if optional:
        return _text(annotation | None)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, types.NoneType):
        return "None"
    if annotation is Any:
        return "Any"
    if origin in (types.UnionType, typing.Union):
        parts = dict.fromkeys(_text(part) for part in arguments)
        return " | ".join(sorted(parts, key=lambda part: part == "None"))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(json.dumps, arguments))}]"
    if origin in (collections.abc.Callable, typing.Callable) or annotation is collections.abc.Callable:
        return "Callable[..., Any]"
    name: str = (origin or annotation).__name__
    if not arguments:
        return "dict[str, Any]" if annotation is dict else name
    inner = ", ".join("..." if part is ... else _text(part) for part in arguments)
    return f"{name}[{inner}]"


if __name__ == "__main__":
    print(stub(), end="")
