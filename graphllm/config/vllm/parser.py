"""Engine options in a script's own command line: `EngineArgs.add_cli_args` and `FlexibleArgumentParser`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_origin

from graphllm.config.setting import Definition
from graphllm.config.vllm.names import VLLM_NAMES, ForeignName, read_text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's parser, for options written with underscores, too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does."""
        words: Sequence[str] = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphens(word) for word in words], namespace)


def add_options(parser: argparse.ArgumentParser, defined: Mapping[str, Definition]) -> None:
    """Options for all settings and for vLLM's other names; what is not given is None."""
    options = parser.add_argument_group("engine", "The settings of docs/settings.md.")
    for name, definition in defined.items():
        several = get_origin(definition.type) is tuple and definition.setting.parse is None
        read = str if definition.type in (str, str | None) else read_text
        _add(options, name, definition.help, definition.type is bool, read, "*" if several else None)
    for name, entry in VLLM_NAMES.items():
        _add(options, name, argparse.SUPPRESS, entry.switch, read_text)


def options_of(namespace: argparse.Namespace, defined: Mapping[str, Definition]) -> dict[str, Any]:
    """What was given of them."""
    names: Mapping[str, Definition | ForeignName] = {**defined, **VLLM_NAMES}
    found = {name: getattr(namespace, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _add(
    options: Any, name: str, help: str, switch: bool, read: Callable[[str], Any], nargs: str | None = None
) -> None:
    flag, text = "--" + name.replace("_", "-"), help.replace("%", "%%")
    if switch:
        options.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        options.add_argument(flag, type=read, nargs=nargs, help=text)


def _hyphens(word: str) -> str:
    option, equals, value = word.partition("=")
    return option.replace("_", "-") + equals + value if word.startswith("--") else word
