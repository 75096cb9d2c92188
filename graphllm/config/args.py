"""`EngineArgs`: every setting by name, as a user says it. Generated from `EngineConfig`; a type checker reads
args.pyi."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

from graphllm.config.engine import EngineConfig
from graphllm.config.errors import ConfigError
from graphllm.config.setting import definitions
from graphllm.config.vllm.names import as_settings

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

_DOC = "A model and how to run it. Names and meanings are vLLM's where it has them; other names of vLLM's are accepted"
_DOC += (
    " where they\nmean a setting or change nothing (docs/compatibility.md). Raises ConfigError for a name that there"
)
_DOC += " is not and for\na value that a setting cannot have, alone or with the others.\n\n"


def args_class(config: type[EngineConfig], name: str = "EngineArgs") -> type:
    """A flat frozen dataclass with a keyword for every setting in a tree of config dataclasses; the first one may be
    given without its name."""
    defined = definitions(config)
    defaults = {name: d.unsaid for name, d in defined.items()}
    first = next(iter(defined))

    def read_all(self: Any, /, *named: Any, **given: Any) -> None:
        if len(named) > 1:
            raise ConfigError(f"{name} has {len(named)} arguments without a name: give all but {first} by name")
        given = {**dict(zip((first,), named, strict=False)), **given}
        settings = defaults | as_settings(given, defaults)
        for definition in defined.values():
            object.__setattr__(self, definition.name, definition.read(settings[definition.name]))
        config.check(vars(self))

    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Give a parser options for all of these."""
        from graphllm.config.vllm.parser import add_options

        add_options(parser, defined)
        return parser

    def from_cli_args(cls: Any, args: Namespace) -> Any:
        """From what such a parser has read."""
        from graphllm.config.vllm.parser import options_of

        return cls(**options_of(args, defined))

    fields = [
        (d.name, d.said, dataclasses.field(default=d.unsaid, kw_only=number > 0))
        for number, d in enumerate(defined.values())
    ]
    lines = (textwrap.fill(f"{d.name}: {d.help}", 112, subsequent_indent="    ") for d in defined.values())
    namespace = {
        "__init__": read_all,
        "__doc__": _DOC + "\n".join(lines),
        "__module__": __name__,
        "add_cli_args": staticmethod(add_cli_args),
        "from_cli_args": classmethod(from_cli_args),
    }
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace=namespace)


EngineArgs = args_class(EngineConfig)
