"""The reference of all settings and sampling parameters, docs/settings.md; write it with
``python -m graphllm.config.reference > docs/settings.md``."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any

from graphllm.config.engine import EngineConfig
from graphllm.config.parameter import parameters
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.server import ServerConfig
from graphllm.config.setting import Definition, definitions

_HEAD = """# Settings

This page is generated from the definitions in `graphllm/config/`; `python -m graphllm.config.reference` prints it.

Every setting is a keyword of `LLM` and `EngineArgs` and, where an option is named, one of `graphllm compile`, `run`,
`serve` and `bench`, as far as it means something to them. What a setting is called does not change on the way to the
code that reads it. "Key" says whether it is part of what names an artifact: with another value, another one is made.
"""
_SERVER = """
## Options of the server

`graphllm serve` has these options, too (`graphllm.config.server.ServerConfig`). A switch of type bool has no value.
"""
_SAMPLING = """
## Sampling parameters

Fields of `SamplingParams`, of requests over HTTP, of lines of batch files, and options of `graphllm run` and `chat`.
What a request leaves out has the value that the checkpoint's `generation_config.json` gives, else the default here.
"""


def reference(config: type = EngineConfig, params: type = SamplingParams, server: type = ServerConfig) -> str:
    """The page, in Markdown."""
    parts = [_HEAD]
    for path, found in _by_group(config).items():
        title = _type_at(config, path).__name__
        parts.append(f"\n## {title}\n")
        rows = ([f"`{d.name}`", _kind(d.said), _default(d), d.setting.help, _option(d), _key(d)] for d in found)
        parts.append(_table(["setting", "type", "default", "what it is", "option", "key"], rows))
    parts.append(_SERVER)
    for path, found in _by_group(server).items():
        parts.append(f"\n### {_type_at(server, path).__name__}\n")
        rows = ([f"`--{d.name.replace('_', '-')}`", _kind(d.said), _default(d), d.setting.help] for d in found)
        parts.append(_table(["option", "type", "default", "what it is"], rows))
    parts.append(_SAMPLING)
    rows = ([f"`{p.name}`", _kind(p.type), _plain(p.default), p.parameter.help] for p in parameters(params).values())
    parts.append(_table(["parameter", "type", "default", "what it is"], rows))
    return "\n".join(parts) + "\n"


def _by_group(config: type) -> dict[tuple[str, ...], list[Definition]]:
    groups: dict[tuple[str, ...], list[Definition]] = {}
    for d in definitions(config).values():
        groups.setdefault(d.path, []).append(d)
    return groups


def _type_at(config: type, path: tuple[str, ...]) -> type:
    for name in path:
        config = typing.get_type_hints(config)[name]
    return config


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _kind(annotation: Any) -> str:
    """A type as people read it."""
    if annotation is Any:
        return "anything"
    if annotation is types.NoneType:
        return "None"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(a) for a in arguments)
    if origin is collections.abc.Callable:
        return "function"
    if arguments:
        inner = ", ".join(_kind(a) for a in arguments if a is not Ellipsis)
        return f"{'sequence' if origin is not dict else 'dict'} of {inner}"
    return annotation.__name__


def _default(d: Definition) -> str:
    return d.setting.auto if d.setting.auto is not None else _plain(d.default)


def _plain(value: Any) -> str:
    if value in ((), "") or value is dataclasses.MISSING:
        return "none"
    text = ", ".join(value) if isinstance(value, tuple) else value.name if hasattr(value, "name") else value
    return f"`{text}`"


def _option(d: Definition) -> str:
    if d.option is None:
        return ""
    return f"`{d.option}`, `--no-{d.option[2:]}`" if d.type is bool else f"`{d.option}`"


def _key(d: Definition) -> str:
    return "yes" if d.not_key is None else f"no: {d.not_key}"


if __name__ == "__main__":
    print(reference(), end="")
