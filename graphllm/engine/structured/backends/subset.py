"""JSON schemas for backends that enforce a part of them: brought to a few shapes, each of one kind, and refused by name
where a backend does not enforce a keyword of a shape.

What is left is never weaker than what was asked for: objects that list properties have no others, and a schema that
does not say its type has one that its keywords are about.

Kinds, with the keywords that may stand there: "any" ({}), "$ref", "enum" (its values), "anyOf" (its options), and the
types "null", "boolean", "integer", "number", "string", "array", "object". Two words name what is no keyword:
"recursion" of "$ref", and "map" of "object", properties of any name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphllm.engine.structured.schemas.schema import rewrite_schema
from graphllm.engine.structured.source import UnsupportedError

_FIELD = "json"
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": _BOUNDS,
    "integer": _BOUNDS,
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains")),
    "object": frozenset(
        (
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        )
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_INFERRED = ("string", "number", "array", "object")  # of keywords; an integer is a number


def reduced_schema(schema: Any, closed: bool, shapes: Mapping[str, frozenset[str]]) -> Any:
    """The schema in shapes. closed: as for `rewrite_schema`. Raises ConfigError, UnsupportedError."""
    plain, _ = rewrite_schema(schema, closed)
    reducer = _Reducer(plain if isinstance(plain, dict) else {}, shapes)
    return reducer.run(plain)


class _Reducer:
    def __init__(self, root: Mapping[str, Any], shapes: Mapping[str, frozenset[str]]) -> None:
        self._definitions, self._shapes = root.get("$defs", {}), shapes
        self._open: list[str] = []  # definitions that are being read
        self._done: dict[str, Any] = {}

    def run(self, plain: Any) -> Any:
        if isinstance(plain, dict):
            plain = {name: value for name, value in plain.items() if name != "$defs"}
        root = self._reduce(plain, "#")
        return {**root, "$defs": self._done} if self._done else root

    def _reduce(self, node: Any, where: str) -> Any:
        if isinstance(node, bool):
            node = {} if node else {"not": {}}
        node = {name: value for name, value in node.items() if name not in ("$schema", "$id")}
        node = self._merged(node, where)
        if not node:
            return self._shape("any", node, where)
        if "$ref" in node:
            return self._reference(self._shape("$ref", node, where), where)
        if "const" in node or "enum" in node:
            return self._values(node, where)
        if "anyOf" in node:
            return self._options(node, where)
        types = node.get("type")
        if isinstance(types, str):
            return self._typed(types, node, where)
        names = types or [t for t in _INFERRED if not _OF_TYPE[t].isdisjoint(node)]
        own = {name: value for name, value in node.items() if name != "type"}
        stray = next((name for name in own if not any(name in _OF_TYPE[t] for t in names)), None)
        if stray is not None:
            raise UnsupportedError(_FIELD, stray, where)
        if "number" in names and "integer" in names:
            names = [name for name in names if name != "integer"]
        kept = [{"type": t, **{k: v for k, v in own.items() if k in _OF_TYPE[t]}} for t in names]
        if len(kept) == 1:
            return self._typed(names[0], kept[0], where)
        return self._shape("anyOf", {"anyOf": [self._typed(o["type"], o, where) for o in kept]}, where)

    def _merged(self, node: Mapping[str, Any], where: str) -> dict[str, Any]:
        """With allOf of one schema put into it: so a format is a pattern, and oneOf is anyOf."""
        node = dict(node)
        parts = node.pop("allOf", [])
        for part in parts:
            inside = self._merged(part, where) if isinstance(part, dict) else {"not": {}}
            twice = next((name for name in inside if name in node and node[name] != inside[name]), None)
            if twice is not None or (node.keys() | inside.keys()) & {"$ref"}:
                raise UnsupportedError(_FIELD, "allOf", where, "", "several schemas that limit the same")
            if {"properties", "additionalProperties", "items"} & inside.keys() and node:
                raise UnsupportedError(_FIELD, "allOf", where, "", "several schemas of objects or arrays")
            node |= inside
        return node

    def _reference(self, node: Any, where: str) -> Any:
        name = node["$ref"].removeprefix("#/$defs/")
        if name in self._open and "recursion" not in self._shapes["$ref"]:
            raise UnsupportedError(_FIELD, "$ref", where, "recursion", "it leads back to itself")
        if name not in self._done and name not in self._open:
            self._open.append(name)
            self._done[name] = self._reduce(self._definitions[name], f"#/$defs/{name}")
            self._open.remove(name)
        return node

    def _values(self, node: Mapping[str, Any], where: str) -> Any:
        values = [node["const"]] if "const" in node else node["enum"]
        types = node.get("type", [])
        types = [types] if isinstance(types, str) else types
        rest = {name: value for name, value in node.items() if name not in ("const", "type", "enum")}
        if "const" in node and "enum" in node:
            rest["enum"] = node["enum"]
        if rest:
            raise UnsupportedError(_FIELD, next(iter(rest)), where, "", "together with listed values")
        values = [value for value in values if not types or any(_is(value, t) for t in types)]
        if not values:
            raise UnsupportedError(_FIELD, "enum", where, "", "no value is of the type")
        return self._shape("enum", {"enum": values}, where)

    def _options(self, node: Mapping[str, Any], where: str) -> Any:
        kind = {"type": node["type"]} if "type" in node else {}
        options = []
        for i, option in enumerate(node["anyOf"]):
            inside = {**kind, **option} if isinstance(option, dict) else option
            alike = isinstance(inside, dict) and "$ref" not in inside and _types(inside) <= _types(node)
            if kind and not alike:
                raise UnsupportedError(_FIELD, "type", f"{where}/anyOf/{i}", "", "together with anyOf")
            options.append(self._reduce(inside, f"{where}/anyOf/{i}"))
        stray = next((name for name in node if name not in ("anyOf", "type")), None)
        if stray is not None:
            raise UnsupportedError(_FIELD, stray, where, "", "together with anyOf")
        return self._shape("anyOf", {"anyOf": options}, where)

    def _typed(self, kind: str, node: Mapping[str, Any], where: str) -> Any:
        """Of one type; keywords about others say nothing there."""
        about_others = frozenset().union(*_OF_TYPE.values()) - _OF_TYPE[kind]
        node = {name: value for name, value in node.items() if name not in about_others}
        if kind == "object":
            node = self._object(node, where)
        if kind == "array":
            node = self._array(node, where)
        return self._shape(kind, node, where)

    def _object(self, node: Mapping[str, Any], where: str) -> dict[str, Any]:
        node = dict(node)
        others = node.get("additionalProperties", True)
        if node.get("properties"):
            if node.pop("additionalProperties", False) is not False:
                raise UnsupportedError(_FIELD, "additionalProperties", where, "object", "together with properties")
            unnamed = set(node.get("required", ())) - set(node["properties"])
            inside = {n: v for n, v in node["properties"].items() if v is not False}
            if unnamed or set(node.get("required", ())) - set(inside):
                raise UnsupportedError(_FIELD, "required", where, "object", "of a name that properties lacks")
            node["properties"] = {n: self._reduce(v, f"{where}/properties/{n}") for n, v in inside.items()}
            return node
        if node.get("required"):
            raise UnsupportedError(_FIELD, "required", where, "object", "of a name that properties lacks")
        node.pop("properties", None)
        node.pop("required", None)
        if others is not False:
            node["additionalProperties"] = self._reduce(others, f"{where}/additionalProperties")
        return node

    def _array(self, node: Mapping[str, Any], where: str) -> dict[str, Any]:
        node = dict(node)
        if "prefixItems" in node:
            if node.pop("items", False) is not False:
                raise UnsupportedError(_FIELD, "items", where, "array", "together with prefixItems")
            parts = enumerate(node["prefixItems"])
            node["prefixItems"] = [self._reduce(item, f"{where}/prefixItems/{i}") for i, item in parts]
        elif node.get("items", True) is False:
            node["maxItems"] = 0
            node.pop("items")
        else:
            node["items"] = self._reduce(node.get("items", {}), f"{where}/items")
        return node

    def _shape(self, kind: str, node: dict[str, Any], where: str) -> dict[str, Any]:
        """The node, if the backend enforces it."""
        if kind not in self._shapes:
            raise UnsupportedError(_FIELD, kind if kind != "any" else "a value of any kind", where, kind)
        for keyword in node:
            free = keyword == "additionalProperties" and node[keyword] is not False
            if keyword not in (kind, "type") and ("map" if free else keyword) not in self._shapes[kind]:
                what = "properties of any name" if free else keyword
                raise UnsupportedError(_FIELD, what, where, kind)
        return node


def _types(node: Mapping[str, Any]) -> set[str]:
    given = node.get("type", _OF_TYPE)
    names = {given} if isinstance(given, str) else set(given)
    return names | {"integer"} if "number" in names else names


def _is(value: Any, kind: str) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": number and value == int(value),
        "number": number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }[kind]
