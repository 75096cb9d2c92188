"""Tools of a request: what is refused by which name, what forced calls may be by others' judgement, templates."""

from __future__ import annotations

import copy
import enum
import json
import re
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from jsonschema import Draft202012Validator

import graphllm.embedded
from graphllm.chat.replies import ReplyFormat, ReplyReader, merged
from graphllm.chat.tools import ToolUse, check_tools, constraint, detect_reasoning, detect_tools
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import StructuredOutputsParams
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.structured.backends.llguidance import GrammarCompiler

EMBEDDED = Path(graphllm.embedded.__file__).parent / "model"
STOP = 2


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Place(pydantic.BaseModel):
    city: str = pydantic.Field(description="Its name")
    country: Literal["NO", "SE"] | None = None


class GetWeather(pydantic.BaseModel):
    """The weather somewhere."""

    place: Place
    unit: Unit = Unit.CELSIUS
    days: list[int] = []


class Node(pydantic.BaseModel):
    """A tree: a schema that refers to itself."""

    value: float
    children: list[Node] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    place: Place  # as in GetWeather, from definitions of its own


class Adopt(pydantic.BaseModel):
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    others: dict[str, Unit] = {}


MODELS = {"get_weather": GetWeather, "node": Node, "adopt": Adopt}
GOOD: dict[str, list[dict[str, Any]]] = {
    "get_weather": [
        {"place": {"city": "Oslo", "country": "NO"}, "unit": "fahrenheit", "days": [1, 2]},
        {"place": {"city": ""}},
    ],
    "node": [{"value": 1.5, "children": [{"value": -2, "children": [{"value": 0}]}]}],
    "adopt": [
        {"pet": {"kind": "cat", "lives": 9}},
        {"pet": {"kind": "dog", "place": {"city": "Bergen"}}, "others": {"x": "celsius"}},
    ],
}
BAD: dict[str, list[Any]] = {
    "get_weather": [
        {},
        {"place": {"city": 1}},
        {"place": {"city": "", "country": "DE"}},
        {"place": {"city": ""}, "unit": "K"},
        [],
    ],
    "node": [{"value": 1, "children": [{"value": "x"}]}, {"children": []}],
    "adopt": [{"pet": {"kind": "cat"}}, {"pet": {"kind": "cow", "lives": 1}}, {"pet": {"kind": "dog", "place": 1}}],
}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    schema = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **schema, **fields}}


def of_models() -> list[dict[str, Any]]:
    return [tool(name, model.model_json_schema()) for name, model in MODELS.items()]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(EMBEDDED)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(EMBEDDED, tokenizer.vocab_size, frozenset([STOP]))


def allows(compiler: GrammarCompiler, tokenizer: Tokenizer, use: ToolUse, document: Any) -> bool:
    """Whether the constraint lets a document through. jsonschema has to be of the same opinion."""
    fields = constraint(use)
    assert fields is not None
    Draft202012Validator.check_schema(fields["json"])
    tokens = [*tokenizer.encode(json.dumps(document), add_special_tokens=False), STOP]
    grammar = compiler.compile(StructuredOutputsParams(**fields))
    allowed = grammar.matcher().validate(tokens) == len(tokens)
    assert allowed == Draft202012Validator(fields["json"]).is_valid(document), document
    return allowed


# --- the fields of a request


def test_what_is_taken() -> None:
    tools = of_models()
    before = copy.deepcopy(tools)
    assert check_tools(tools, None, True) == ToolUse(tools, "auto", True)
    assert check_tools(tools, "auto", False) == ToolUse(tools, "auto", False)
    assert check_tools(tools, "none", True).choice == "none"
    assert check_tools(tools, "required", True).choice == "required"
    assert check_tools(tools, named("node"), True).choice == "node"
    assert tools == before
    for nothing in (None, []):
        for choice in (None, "none", "auto"):
            assert check_tools(nothing, choice, True) == ToolUse([], "none", True)
    assert len(check_tools([tool(f"f{i}") for i in range(128)], None, True).tools) == 128
    assert check_tools([tool("a_b-c.9", {}, description="x")], None, True).tools == [
        tool("a_b-c.9", {}, description="x")
    ]


def test_tools_as_openais_client_makes_them(compiler: GrammarCompiler) -> None:
    tools = [dict(openai.pydantic_function_tool(model, name=name)) for name, model in MODELS.items()]
    assert all(t["function"]["strict"] for t in tools)  # type: ignore[index]
    use = check_tools(tools, "required", True)
    for made, checked in zip(tools, use.tools, strict=True):
        function = dict(made["function"])  # type: ignore[call-overload]
        assert checked == {"type": "function", "function": {k: v for k, v in function.items() if k != "strict"}}
    compiler.check(StructuredOutputsParams(**(constraint(use) or {})))


def test_null_stands_for_nothing() -> None:
    given = tool("f", description=None, strict=None) | {"function": {"name": "f", "parameters": None}}
    assert check_tools([given], None, True).tools == [tool("f")]


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("f", None, "tools is 'f'"),
        ([tool(f"f{i}") for i in range(129)], None, "tools is [{"),
        ([7], None, "tools[0] is 7"),
        ([tool("f"), {"function": {}}], None, "tools[1].type is None"),
        ([{"type": "web_search"}], None, "tools[0].type is 'web_search': not supported"),
        ([{"type": "function"}], None, "tools[0].function is None"),
        ([{"type": "function", "name": "f"}], None, "tools[0].function is None"),
        ([tool("f") | {"cache": 1}], None, "tools[0].cache is 1: not supported"),
        ([tool("f", extra="x" * 200)], None, "tools[0].function.extra is 'xxx"),
        ([tool("")], None, "tools[0].function.name is ''"),
        ([tool("a b")], None, "tools[0].function.name is 'a b'"),
        ([tool("f\n")], None, "tools[0].function.name is 'f\\n'"),
        ([tool("x" * 65)], None, "tools[0].function.name is 'xxx"),
        ([tool("auto")], None, "tools[0].function.name is 'auto'"),
        ([{"type": "function", "function": {"description": "d"}}], None, "tools[0].function.name is None"),
        ([tool("f"), tool("g"), tool("f")], None, "tools[2].function.name is 'f'"),
        ([tool("f", description=7)], None, "tools[0].function.description is 7"),
        ([tool("f", strict="yes")], None, "tools[0].function.strict is 'yes'"),
        ([tool("f", [])], None, "tools[0].function.parameters is []"),
        ([tool("f", {"type": "string"})], None, "tools[0].function.parameters.type is 'string'"),
        ([tool("f")], "any", "tool_choice is 'any'"),
        ([tool("f")], 7, "tool_choice is 7"),
        ([tool("f")], {"type": "allowed_tools"}, "tool_choice.type is 'allowed_tools': not supported"),
        ([tool("f")], {"function": {"name": "f"}}, "tool_choice.type is None"),
        ([tool("f")], {"type": "function"}, "tool_choice.function.name is None"),
        ([tool("f")], named("g"), "tool_choice.function.name is 'g'"),
        ([tool("f")], {"type": "function", "function": {"name": ["f"]}}, "tool_choice.function.name is ['f']"),
        (None, "required", "tool_choice is 'required'"),
        ([], named("f"), "tool_choice.function.name is 'f'"),
    ],
)
def test_what_is_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)) as refusal:
        check_tools(tools, choice, True)
    assert len(str(refusal.value)) < 250


# --- calls that must be made


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_calls_in_the_words_of_any_model(key: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    use = check_tools([tool("g"), tool("f", schema)], "required", True)
    assert allows(compiler, tokenizer, use, [{"name": "g", key: {}}, {"name": "f", key: {"x": 7}}])
    assert not allows(compiler, tokenizer, use, [{"name": "f", key: {"x": "7"}}])
    assert not allows(compiler, tokenizer, use, [{"name": "f", "arguments": {"x": 7}, "parameters": {"x": 7}}])


def test_no_constraint_without_force() -> None:
    assert constraint(check_tools(of_models(), "auto", True)) is None
    assert constraint(check_tools(of_models(), "none", True)) is None
    assert constraint(check_tools(None, None, True)) is None


def test_required_calls(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    several, one = (check_tools(of_models(), "required", parallel) for parallel in (True, False))
    calls = [{"name": name, "parameters": arguments} for name, given in GOOD.items() for arguments in given]
    for call in calls:
        MODELS[call["name"]].model_validate(call["parameters"])  # the test's own examples
        assert allows(compiler, tokenizer, one, [call])
    assert allows(compiler, tokenizer, several, calls)
    assert allows(compiler, tokenizer, several, calls[:1] * 16)
    assert not allows(compiler, tokenizer, several, calls[:1] * 17)
    for document in ([], calls[:2], calls[0], [{}], [{"name": "node"}], [{**calls[0], "name": "node"}],
                     [{**calls[0], "name": "other"}], [{**calls[0], "id": 1}]):  # fmt: skip
        assert not allows(compiler, tokenizer, one, document)
    for name, bad in BAD.items():
        for arguments in bad:
            assert not allows(compiler, tokenizer, one, [{"name": name, "parameters": arguments}])


@pytest.mark.parametrize("name", MODELS)
def test_named_call(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    use = check_tools(of_models(), named(name), True)
    assert all(allows(compiler, tokenizer, use, arguments) for arguments in GOOD[name])
    assert not any(allows(compiler, tokenizer, use, arguments) for arguments in BAD[name])


def test_required_calls_are_read_back() -> None:
    calls = [{"name": name, "parameters": arguments} for name, given in GOOD.items() for arguments in given]
    reader = ReplyReader(ReplyFormat(tools="json"))
    reply = merged([*reader.feed(json.dumps(calls)), *reader.finish()])
    assert [{"name": c.name, "parameters": json.loads(c.arguments)} for c in reply.calls] == calls


@pytest.mark.parametrize("choice", ["required", named("f")])
def test_arguments_are_an_object(choice: Any, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Whatever the schema leaves open; and nothing at all without a schema."""

    def fits(parameters: Any, arguments: Any) -> bool:
        use = check_tools([tool("f", parameters)], choice, True)
        call = [{"name": "f", "parameters": arguments}] if choice == "required" else arguments
        return allows(compiler, tokenizer, use, call)

    for open_schema in (
        {"type": "object"},
        {"properties": {"a": {"type": "integer"}}},
        {"anyOf": [True, {"type": "null"}]},
    ):
        assert fits(open_schema, {})
        assert fits(open_schema, {"b": [1]})
        assert not any(
            fits(open_schema, other) for other in ([], 7, "x", None, {"a": "x"} if "properties" in open_schema else 1)
        )
    for nothing in (None, {}):
        assert fits(nothing, {})
        assert not any(fits(nothing, other) for other in ([], None, {"a": 1}))


REFERENCES: dict[str, tuple[dict[str, Any], Any, Any]] = {  # a schema, arguments that satisfy it, others
    "to the whole": (
        {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        {"next": {"next": {}}}, {"next": 1},
    ),
    "from the root": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"type": "null"}}, "required": ["x"]}}},
        {"x": None}, {"x": 1},
    ),
    "to old definitions": (
        {"$id": "https://example.com/a", "$schema": "http://json-schema.org/draft-07/schema#",
         "properties": {"x": {"$ref": "#/definitions/a~1b"}}, "definitions": {"a/b": {"enum": [1]}}},
        {"x": 1}, {"x": 2},
    ),
    "into properties": (
        {"properties": {"x": {"type": "integer"}, "y": {"$ref": "#/properties/x"}}},
        {"y": 1}, {"y": "a"},
    ),
    "through lists": (
        {"properties": {"x": {"allOf": [{"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}]},
                        "y": {"type": "array", "prefixItems": [{"$ref": "#/$defs/n"}], "items": {"$ref": "#/$defs/n"}}},
         "$defs": {"n": {"const": 5}}},
        {"x": 5, "y": [5, 5]}, {"x": None, "y": [5, 6]},
    ),
    "beside names that are keywords": (
        {"properties": {"enum": {"$ref": "#/$defs/const"}, "properties": {"$ref": "#/$defs/$defs"},
                        "required": {"$ref": "#/$defs/const"}},
         "$defs": {"const": {"type": "integer"}, "$defs": {"type": "null"}}},
        {"enum": 1, "properties": None, "required": 2}, {"enum": "x"},
    ),
    "that are data": ({"properties": {"x": {"const": {"$ref": "#/a"}}, "y": {"enum": [{"$ref": "#"}]}}},
                      {"x": {"$ref": "#/a"}, "y": {"$ref": "#"}}, {"x": {"$ref": "#/$defs/0/a"}}),
}  # fmt: skip


def test_what_nothing_refers_to_may_be_anything(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    odd = {"$defs": {"x": {"$ref": 7, "properties": 7}, "y": 7}, "definitions": 7, "examples": [{"$ref": "#/no"}]}
    use = check_tools([tool("f", {"title": "f", **odd})], "required", True)
    grammar = compiler.compile(StructuredOutputsParams(**(constraint(use) or {})))
    tokens = tokenizer.encode('[{"name": "f", "parameters": {}}]', add_special_tokens=False)
    assert grammar.matcher().validate(tokens) == len(tokens)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_hold(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema, good, bad = REFERENCES[name]
    before = copy.deepcopy(schema)
    tools = [tool("g", {"$defs": {"a": False, "n": False}, "definitions": {"a/b": False}}), tool("f", schema)]
    for choice in ("required", named("f")):
        use = check_tools(tools, choice, True)
        for arguments, fits in ((good, True), (bad, False)):
            assert Draft202012Validator({"type": "object"} | schema).is_valid(arguments) == fits
            document = [{"name": "f", "parameters": arguments}] if choice == "required" else arguments
            assert allows(compiler, tokenizer, use, document) == fits
    assert schema == before


@pytest.mark.parametrize("choice", ["required", named("f")])
def test_schemas_that_cannot_be_enforced(choice: Any) -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    cases = [
        ({"properties": {"a": {"not": {}}}}, "/properties/a"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "#/$defs/x"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "other.json"),
        ({"properties": {"a": {"$ref": 7}}}, "$ref 7"),
        ({"properties": 7}, "properties is 7"),
        ({"properties": {"a": 7}}, "/properties/a"),
        (deep, "nested deeper"),
    ]
    for schema, problem in cases:
        use = check_tools([tool("g"), tool("f", schema)], choice, True)
        with pytest.raises(ConfigError, match=r"^tools\[1\]\.function\.parameters: .*" + re.escape(problem)):
            constraint(use)
        assert constraint(check_tools([tool("f", schema)], "auto", True)) is None


# --- templates


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", None, False),
        ("{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}", "mistral", False),
        ("{{- '<tool_call>\\n{\"name\": \"' }}{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}", "hermes", True),
        ("{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", None, False),
        ("{{- '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", None, False),
        ("{{- \"<|python_tag|>\" + tool_call.name + \".call(\" }}", "llama3", False),
        ("{%- if tools %}{{- \"Environment: ipython\\n\" }}{%- endif %}", "llama3", False),
        ("{{- '{\"name\": name, \"parameters\": dictionary of argument name and its value}.' }}", "llama3", False),
        ("{% set content = content.split('</think>')[-1] %}", None, True),
        ("", None, False),
    ],
)  # fmt: skip
def test_what_a_template_shows(template: str, tools: str | None, reasoning: bool) -> None:
    assert (detect_tools(template), detect_reasoning(template)) == (tools, reasoning)


def test_the_embedded_template(tokenizer: Tokenizer) -> None:
    assert (detect_tools(tokenizer.chat_template), detect_reasoning(tokenizer.chat_template)) == ("hermes", False)
