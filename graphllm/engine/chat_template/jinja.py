"""What a chat template needs of jinja2: its environment, its syntax tree, and rendering. Importing this file imports
jinja2, which takes a while."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graphllm.config import ConfigError

_LISTED = ("selectattr", "rejectattr", "select", "reject", "list", "reverse", "default", "d")  # filters that keep parts


class Wants(NamedTuple):
    """What a template wants of messages.

    parts: content is a list of parts, which it walks over, and no text.
    none: content is none where a message is nothing but calls.
    short_ids: ids of calls are nine letters or digits, as Mistral's templates demand.
    """

    parts: bool
    none: bool
    short_ids: bool


def compiled(source: str) -> tuple[jinja2.Template, Wants]:
    """A template, and what its source says of messages. Raises ConfigError for one that does not compile."""
    environment = _environment()
    try:
        tree = environment.parse(source)
        wants = wants_of(tree, source)
        return environment.from_string(tree), wants
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError(f"chat template: line {e.lineno}: {e.message}") from e


def wants_of(tree: nodes.Template, source: str) -> Wants:
    """What the syntax tree of a template shows: loops over content and questions about it."""
    names = _names_of_content(tree)
    asked = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node, names)}
    reads: list[nodes.Getattr | nodes.Getitem] = [*tree.find_all(nodes.Getattr), *tree.find_all(nodes.Getitem)]
    walks = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    walks = walks or any(_is_first_part(read, names) for read in reads)
    return Wants(walks and "string" not in asked, "none" in asked, "[TOOL_CALLS]" in source)


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables and macros' parameters that may be the content of a message."""
    macros = {macro.name: [arg.name for arg in macro.args] for macro in tree.find_all(nodes.Macro)}
    given: list[tuple[str, nodes.Node]] = [
        (a.target.name, a.node) for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)
    ]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            given += zip(macros[call.node.name], call.args, strict=False)
            given += [(keyword.key, keyword.value) for keyword in call.kwargs]
    names: set[str] = set()
    while new := {name for name, node in given if name not in names and _is_content(node, names)}:
        names |= new
    return names


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression may be the content of a message."""
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr() | nodes.Getitem():
            return _key(node) == "content"
        case nodes.Filter():
            return node.name in _LISTED and _is_content(node.node, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Or():
            return _is_content(node.left, names) or _is_content(node.right, names)
        case nodes.Call():
            first = node.args[0] if node.args else None
            gets = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
            return gets and isinstance(first, nodes.Const) and first.value == "content"
    return False


def _is_first_part(node: nodes.Getattr | nodes.Getitem, names: set[str]) -> bool:
    """Whether a field of a part is read that is found by its number."""
    part = node.node
    numbered = isinstance(part, nodes.Getitem) and type(_key(part)) is int and _is_content(part.node, names)
    return numbered and _key(node) in ("text", "type")


def _key(node: nodes.Getattr | nodes.Getitem) -> object:
    """The name or number of what is read; None where that is no constant."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None


def rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
        raise ConfigError(f"chat template: {e}") from e


def _environment() -> jinja2.Environment:
    """The environment that checkpoints are written for: transformers'."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it only has to be accepted."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
