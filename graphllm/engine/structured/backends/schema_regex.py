"""A regular expression of the documents of a JSON schema, for backends that know nothing else.

Properties come in the order of the schema; where whitespace may stand, there is one space or none; a value of any kind,
and an object without a schema, is nested twice at most; strings escape what must be escaped and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graphllm.engine.structured.backends.regexes import literal, plain_string_pattern
from graphllm.engine.structured.source import UnsupportedError

_CHAR = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])'
_SCALARS = {
    "null": "null",
    "boolean": "(?:true|false)",
    "integer": "(?:0|-?[1-9][0-9]*)",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]{1,3})?",
    "string": f'"{_CHAR}*"',
}
_DEEPEST = 1  # of values of any kind: what stands in an object without a schema is nested so often
_LONGEST = 200_000

# What this enforces, for the `shapes` of a backend.
REGEX_SHAPES: Mapping[str, frozenset[str]] = {
    "any": frozenset(),
    "$ref": frozenset(),
    "enum": frozenset(),
    "anyOf": frozenset(),
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset(),
    "number": frozenset(),
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "map")),
}


def schema_regex(reduced: Mapping[str, Any], spaces: bool) -> str:
    """The expression of all documents of a schema.

    reduced: by `reduced_schema` for REGEX_SHAPES.
    spaces: whether documents may have spaces.

    Raises ConfigError.
    """
    regex = _Writer(reduced.get("$defs", {}), spaces).value(reduced, "#")
    if len(regex) > _LONGEST:
        raise UnsupportedError("json", "a schema of this size", why=f"{len(regex)} characters as an expression")
    return regex


class _Writer:
    def __init__(self, definitions: Mapping[str, Any], spaces: bool) -> None:
        self._definitions = definitions
        self._open: list[str] = []  # definitions that are being written
        self._gap = " ?" if spaces else ""

    def value(self, node: Mapping[str, Any], where: str) -> str:
        if "$ref" in node:
            name = node["$ref"].removeprefix("#/$defs/")
            if name in self._open:
                why = "it leads back to itself, where a schema becomes an expression"
                raise UnsupportedError("json", "$ref", where, "recursion", why)
            self._open.append(name)
            inside = self.value(self._definitions[name], f"#/$defs/{name}")
            self._open.remove(name)
            return inside
        if "enum" in node:
            return _either([literal(_dumped(value)) for value in node["enum"]])
        if "anyOf" in node:
            return _either([self.value(option, where) for option in node["anyOf"]])
        match node.get("type"):
            case "string":
                return self._string(node, where)
            case "array":
                return self._array(node, where)
            case "object":
                return self._object(node, where)
            case None:
                return self._any(_DEEPEST)
            case kind:
                return _SCALARS[str(kind)]

    def _any(self, depth: int) -> str:
        kinds = list(_SCALARS.values())
        kinds.remove(_SCALARS["integer"])  # each is a number
        if depth:
            inside = self._any(depth - 1)
            kinds += [self._list(inside, 0, None), self._map(inside)]
        return _either(kinds)

    def _string(self, node: Mapping[str, Any], where: str) -> str:
        low, high = node.get("minLength", 0), node.get("maxLength")
        if "pattern" not in node:
            return f'"{_CHAR}{times(low, high)}"'
        if low or high is not None:
            raise UnsupportedError("json", "pattern", where, "length", "together with minLength or maxLength")
        return f'"(?:{plain_string_pattern(node["pattern"], "json", where)})"'

    def _array(self, node: Mapping[str, Any], where: str) -> str:
        low, high = node.get("minItems", 0), node.get("maxItems")
        if "prefixItems" not in node:
            item = self.value(node["items"], f"{where}/items") if "items" in node else ""
            return self._list(item, low, high)
        parts = [self.value(part, f"{where}/prefixItems/{i}") for i, part in enumerate(node["prefixItems"])]
        most = len(parts) if high is None else min(high, len(parts))
        if low > most:
            raise UnsupportedError("json", "minItems", where, "array", "more than prefixItems has")
        gap, comma = self._gap, f"{self._gap},{self._gap}"
        inside = ""
        for i in reversed(range(most)):
            inside = (comma if i else "") + parts[i] + inside
            inside = inside if i < low else f"(?:{inside})?"
        return rf"\[{gap}{inside}{gap}\]"

    def _list(self, item: str, low: int, high: int | None) -> str:
        gap = self._gap
        if high == 0:
            return rf"\[{gap}\]"
        more = times(max(low - 1, 0), None if high is None else high - 1)
        inside = f"{item}(?:{gap},{gap}{item}){more}"
        return rf"\[{gap}{inside if low else f'(?:{inside})?'}{gap}\]"

    def _object(self, node: Mapping[str, Any], where: str) -> str:
        if node.get("additionalProperties", False) is not False:
            return self._map(self.value(node["additionalProperties"], where))
        gap = self._gap
        comma = f"{gap},{gap}"
        required = set(node.get("required", ()))
        pairs = [
            (name in required, f"{literal(_dumped(name))}{gap}:{gap}{self.value(value, f'{where}/properties/{name}')}")
            for name, value in node.get("properties", {}).items()
        ]
        first = next((i for i, (needed, _) in enumerate(pairs) if needed), None)
        if first is not None:
            before = "".join(f"(?:{pair}{comma})?" for _, pair in pairs[:first])
            inside = before + pairs[first][1] + _others(pairs[first + 1 :], comma)
        else:  # whichever comes first
            inside = _either([pair + _others(pairs[i + 1 :], comma) for i, (_, pair) in enumerate(pairs)] or [""]) + "?"
        return rf"\{{{gap}{inside if pairs else ''}{gap}\}}"

    def _map(self, value: str) -> str:
        gap = self._gap
        pair = f"{_SCALARS['string']}{gap}:{gap}{value}"
        return rf"\{{{gap}(?:{pair}(?:{gap},{gap}{pair})*)?{gap}\}}"


def _others(pairs: list[tuple[bool, str]], comma: str) -> str:
    return "".join(f"{comma}{pair}" if needed else f"(?:{comma}{pair})?" for needed, pair in pairs)


def _either(options: list[str]) -> str:
    return f"(?:{'|'.join(options)})"


def times(low: int, high: int | None) -> str:
    """A repetition. high: None for no end."""
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
