"""Options of commands, generated from the definitions of settings and of sampling parameters. Imports nothing heavy."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from graphllm.config import EngineArgs, EngineConfig
from graphllm.config.parameter import ParameterDefinition, parameters
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.server import ServerConfig, server_config
from graphllm.config.setting import Definition, choices, definitions
from graphllm.config.vllm.flags import OPTION, CommandLine, vllm_values
from graphllm.config.vllm.names import ForeignName


class EngineCommand(TyperCommand):
    """A command with options of the engine. others: names of vLLM's that are not the engine's."""

    others: Mapping[str, ForeignName] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line."""
        return super().parse_args(ctx, CommandLine(args, self.name or "", self.params, self.others).rewritten())


def engine_options(
    only: Collection[str] | None = None, without: Collection[str] = (), config: type = EngineConfig, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, of class `EngineCommand`, the options of all settings in a tree of config dataclasses. They come
    as its first argument, an `EngineArgs`. only, without: names of settings, where not all mean something to it.
    defaults: other ones than the settings' own."""
    defined = {
        name: d
        for name, d in definitions(config).items()
        if d.option is not None and (only is None or name in only) and name not in without
    }
    parameters = [_parameter(d, defaults.get(name, d.unsaid)) for name, d in defined.items()]
    other = typer.Option(OPTION, hidden=True, help="name=value, of another name of vLLM's.")
    kind: Any = Annotated[list[str] | None, other]
    parameters.append(inspect.Parameter("vllm_name", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))

    def make(given: dict[str, Any]) -> EngineArgs:
        other = vllm_values(given.pop("vllm_name", ()))
        return EngineArgs(**given, **other)

    return _with_options(parameters, make)


def server_options() -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a server. They come as its first argument, a `ServerConfig`. A switch has no
    ``--no-`` form."""
    found = []
    for name, d in definitions(ServerConfig).items():
        option = f"--{name.replace('_', '-')}"
        flags = (option,) if d.type is bool else (_ALIASES[name], option) if name in _ALIASES else ()
        found.append(_parameter(d, d.unsaid, flags))
    return _with_options(found, server_config)


def sampling_options(
    only: Collection[str] | None = None, params: type = SamplingParams, shown: Mapping[str, str] = {}
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options of sampling parameters, of all that have one unless ``only`` names some. It gets as its
    first argument a dict of what was given; all else is for whoever knows the model's defaults. shown: what help says
    of a default, where that is not the parameter's own."""
    offered = [d for d in parameters(params).values() if d.parameter.cli and (only is None or d.name in only)]
    return _with_options([_sampling_option(d, shown.get(d.name)) for d in offered], dict)


def _with_options(
    parameters: Collection[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's first parameter by options; ``make`` turns what they were given into its argument."""
    names = [p.name for p in parameters]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(*outer: Any, **given: Any) -> None:
            taken = {name: given.pop(name) for name in names}
            command(make({name: value for name, value in taken.items() if value is not None}), *outer, **given)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        signature = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *parameters)]
        wrapper.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in signature}
        return wrapper

    return decorate


def _sampling_option(d: ParameterDefinition, shown: str | None) -> inspect.Parameter:
    """An option that has not to be given. One text or id each, repeated, where there may be several."""
    parts = (d.type, *get_args(d.type))
    kind: Any = next((list[get_args(part)[0]] for part in parts if get_origin(part) is tuple), d.type)  # type: ignore[misc]
    optional: Any = kind | None
    if shown is None and isinstance(d.default, (bool, int, float)):
        shown = {True: "on", False: "off"}[d.default] if isinstance(d.default, bool) else str(d.default)
    text = d.parameter.help if shown is None else f"{d.parameter.help} Default: {shown}."
    annotation = Annotated[optional, typer.Option(help=text)]
    return inspect.Parameter(d.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_ALIASES = {"allowed_origins": "--allowed-origin"}
_WIDEST = 45  # letters of choices that fit into a line of 80 after an option's name


def _parameter(d: Definition, default: Any, flags: Sequence[str] = ()) -> inspect.Parameter:
    """An option for a setting. flags: its spellings, where they do not follow from its name."""
    kind: Any = _option_type(d)
    names = [str(c) for c in d.choices if c is not None]
    wide = len("|".join(names)) > _WIDEST
    help = f"{d.help} One of {', '.join(names)}." if wide else d.help
    metavar = "<name>" if wide else None
    annotation = Annotated[kind, typer.Option(*flags, help=help, metavar=metavar, show_default=d.setting.auto is None)]
    if get_origin(kind) in (types.UnionType, typing.Union) and default == ():
        default = None
    return inspect.Parameter(d.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_type(d: Definition) -> Any:
    """What the command line library can read: a text for what the setting parses itself, a list for a sequence."""
    if d.setting.parse is not None:
        return str | None
    if get_origin(d.type) is tuple:
        return list[get_args(d.type)[0]] | None  # type: ignore[misc]
    if choices(d.said) or choices(d.type) or d.setting.written is None:
        return d.said
    return d.type
