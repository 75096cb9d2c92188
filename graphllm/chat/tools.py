"""Tools of a request: what may be called, the grammar of a call that must be made, how a model writes calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from graphllm.chat.replies import ARGUMENTS, FUNCTION_NAME
from graphllm.config import ConfigError
from graphllm.engine.chat_template.conversation import shown_tools
from graphllm.engine.structured.schemas.schema import parse_schema, rewrite_schema

_MAX_TOOLS, MAX_CALLS = 128, 16
_CHOICES = ("none", "auto", "required")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

# JSON Schema keywords with a value that is not a schema: schemas by name, or plain data.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "example", "examples")


class ToolUse(NamedTuple):
    """Tools in OpenAI's form, and which of them are to be called. choice: "none", "auto", "required", or the name of
    the function. parallel: there may be several calls in one reply."""

    tools: list[dict[str, Any]]
    choice: str
    parallel: bool


def check_tools(tools: object, tool_choice: object, parallel: bool) -> ToolUse:
    """Check the fields of a request; None stands for one that is left out. Raises ConfigError.

    The tools in the result have the form that models are shown (`shown_tools`).
    """
    if tools is None:
        tools = []
    if not isinstance(tools, list) or len(tools) > _MAX_TOOLS:
        raise ConfigError(f"tools is {tools!r:.80}: give a list of at most {_MAX_TOOLS} tools")
    checked = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"tools[{i}].function.name is {name!r}, as of another one: give each its own name")
    return ToolUse(shown_tools(checked) or [], _choice(tool_choice, names), parallel)


def _tool(tool: object, where: str) -> dict[str, Any]:
    """A tool of a request, checked."""
    if not isinstance(tool, dict):
        raise ConfigError(f"{where} is {tool!r:.80}: give an object with type and function")
    if tool.get("type") != "function":
        raise ConfigError(f"{where}.type is {tool.get('type')!r:.80}: not supported; give 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ConfigError(f"{where}.function is {function!r:.80}: give an object with name, description, parameters")
    _check_known(tool, ("type", "function"), where)
    _check_known(function, ("name", "description", "parameters", "strict"), f"{where}.function")
    given = {key: value for key, value in function.items() if value is not None}
    name = given.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise ConfigError(f"{where}.function.name is {name!r:.80}: give 1 to 64 letters, digits, _ . or -")
    if name in _CHOICES:
        raise ConfigError(f"{where}.function.name is {name!r}, a value of tool_choice: give another name")
    for key, kind, remedy in (("description", str, "give text"), ("strict", bool, "give true or false")):
        if not isinstance(given.get(key, kind()), kind):
            raise ConfigError(f"{where}.function.{key} is {given[key]!r:.80}: {remedy}")
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ConfigError(f"{where}.function.parameters is {parameters!r:.80}: give a JSON schema")
    if parameters.get("type", "object") != "object":
        raise ConfigError(f"{where}.function.parameters.type is {parameters['type']!r:.80}: give 'object'")
    return {"type": "function", "function": given}


def _check_known(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            raise ConfigError(f"{where}.{key} is {value!r:.80}: not supported; leave it out")


def _choice(given: object, names: list[str]) -> str:
    """What a request's tool_choice says."""
    choice = given if isinstance(given, str) else None
    if given is None:
        choice = "auto"
    elif isinstance(given, dict):
        if given.get("type") != "function":
            raise ConfigError(f"tool_choice.type is {given.get('type')!r:.80}: not supported; give 'function'")
        function = given.get("function")
        choice = function.get("name") if isinstance(function, dict) else None
        if not isinstance(choice, str) or choice not in names:
            raise ConfigError(f"tool_choice.function.name is {choice!r:.80}: give the name of one of tools")
    elif choice not in _CHOICES:
        raise ConfigError(f"tool_choice is {given!r:.80}: give none, auto, required, or a function by its name")
    if choice == "required" and not names:
        raise ConfigError("tool_choice is 'required': there are no tools; give some, or leave it out")
    return choice if names and choice else "none"


def constraint(use: ToolUse) -> dict[str, Any] | None:
    """What the text must be where a call must be made, as fields of StructuredOutputsParams; None where none must. For
    models with an unknown way of writing calls (`forced.in_its_words`).

    The text is then the arguments of the function that is chosen, or an array of calls. Raises ConfigError for a
    parameters' schema that cannot be enforced.
    """
    if use.choice in ("none", "auto"):
        return None
    schemas = argument_schemas(use)
    if use.choice != "required":
        return {"json": schemas[0][1]}
    options: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for i, (name, schema) in enumerate(schemas):
        # Each schema stands as a whole under a name of its own, so that all its references lead into it still.
        definitions[str(i)] = _moved(schema, f"#/$defs/{i}")
        options += [
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{i}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for key in ARGUMENTS  # the model takes the name that it has learned; it writes nonsense after another name
        ]
    most = MAX_CALLS if use.parallel else 1
    calls = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": options}, "$defs": definitions}
    return {"json": calls}


def argument_schemas(use: ToolUse) -> list[tuple[str, dict[str, Any]]]:
    """Names of the functions that may be called when a call is required, with the schemas of their arguments. Raises
    ConfigError for a schema that cannot be enforced."""
    names = [tool["function"]["name"] for tool in use.tools]
    wanted = [i for i, name in enumerate(names) if use.choice in ("required", name)]
    return [(names[i], _parameters(use.tools[i], i)) for i in wanted]


def _parameters(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The schema of a tool's arguments. Raises ConfigError where it cannot be enforced."""
    schema = {"type": "object", **(tool["function"].get("parameters") or _NO_ARGUMENTS)}
    try:
        rewrite_schema(parse_schema(schema))
    except ConfigError as e:
        problem = str(e).removeprefix("structured_outputs.json: ")
        raise ConfigError(f"tools[{i}].function.parameters: {problem}") from e
    return schema


def _moved(schema: Any, to: str) -> Any:
    """A schema that was a document of its own, as a part of another one. to: its place there."""
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            moved[key] = to + value.removeprefix("#")
        elif key in _DATA:
            moved[key] = value
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(item, to) for name, item in value.items()}
        elif isinstance(value, list):
            moved[key] = [_moved(item, to) for item in value]
        elif key != "$id":  # which only a whole document has
            moved[key] = _moved(value, to)
    return moved


def detect_tools(template: str) -> str | None:
    """How a model writes its calls (a format of `replies`), by its chat template; None when that does not show it."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    # The same tag stands around calls that are no JSON.
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if any(mark in template for mark in ("<|python_tag|>", "Environment: ipython", "dictionary of argument name")):
        return "llama3"
    return None


def detect_reasoning(template: str) -> bool:
    """Whether a model thinks within ``<think>`` tags before it answers, by its chat template."""
    return "</think>" in template
