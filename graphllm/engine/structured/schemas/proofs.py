"""What can be proved of JSON schemas: that two exclude each other, and that a document of one can end.

For schemas as `graphllm.engine.structured.schemas.schema` writes them. ``definitions``: what ``$ref`` "#/$defs/NAME"
means, by NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MAX_STEPS, _MAX_DEPTH = 100_000, 12
_ALL = frozenset(["null", "boolean", "number", "string", "array", "object"])


class Exclusion:
    """Proofs for one document; all of them together take a bounded number of steps, then everything is unproved."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions, self._steps = definitions, 0

    def disjoint(self, a: Any, b: Any, depth: int = _MAX_DEPTH) -> bool:
        """Whether certainly no document satisfies both."""
        self._steps += 1
        if depth == 0 or self._steps > _MAX_STEPS:
            return False
        if isinstance(a, bool) or isinstance(b, bool):
            return a is False or b is False
        for x, y in ((a, b), (b, a)):
            if any(self.disjoint(part, y, depth - 1) for part in self._parts(x)):
                return True
            if "anyOf" in x and all(self.disjoint(option, y, depth - 1) for option in x["anyOf"]):
                return True
        values, others = _values(a), _values(b)
        if values is not None and others is not None:
            self._steps += len(values) + len(others)
            return not {_canonical(v) for v in values} & {_canonical(v) for v in others}
        shared = _types(a) & _types(b)
        if shared != {"object"}:
            return not shared
        for x, y in ((a, b), (b, a)):
            theirs = y.get("properties", {})
            lacks = y.get("additionalProperties") is False and "patternProperties" not in y
            for name in x.get("required", ()):
                if name not in theirs and lacks:
                    return True
                mine = x.get("properties", {}).get(name, True)
                if self.disjoint(mine, theirs.get(name, True), depth - 1):
                    return True
        return False

    def _parts(self, node: dict[str, Any]) -> Iterator[Any]:
        """Other schemas that hold with this one."""
        yield from node.get("allOf", ())
        if "$ref" in node:
            yield self._definitions[node["$ref"].rsplit("/", 1)[1]]


def has_loop(definitions: Mapping[str, Any]) -> bool:
    """Whether some definition says that a value satisfies it if that same value satisfies it."""
    left = {name: set(_same_value(d)) for name, d in definitions.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    return bool(left)


def _same_value(node: Any) -> Iterator[str]:
    """The definitions that a schema applies to the value itself, not to a part of it."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rsplit("/", 1)[1]
        for part in [*node.get("allOf", ()), *node.get("anyOf", ())]:
            yield from _same_value(part)


def has_end(schema: Any, definitions: Mapping[str, Any]) -> bool:
    """Whether a document can satisfy a schema without containing itself for ever. May say yes wrongly."""
    users: dict[str, list[str]] = {name: [] for name in definitions}
    for name, definition in definitions.items():
        for used in users.keys() & set(_references(definition)):
            users[used].append(name)
    known, waiting = set[str](), list(definitions)
    while waiting:
        name = waiting.pop()
        if name not in known and _finite(definitions[name], known):
            known.add(name)
            waiting += users[name]
    return _finite(schema, known)


def _references(node: Any) -> Iterator[str]:
    """The definitions that a schema refers to, and perhaps other names."""
    if isinstance(node, dict) and isinstance(node.get("$ref"), str):
        yield node["$ref"].rsplit("/", 1)[-1]
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _references(part)


def _finite(node: Any, known: set[str]) -> bool:
    """Whether a document of the schema can end, if documents of the ``known`` definitions can. May say yes wrongly."""
    if isinstance(node, bool):
        return True
    if "$ref" in node and node["$ref"].rsplit("/", 1)[1] not in known:
        return False
    if not all(_finite(part, known) for part in node.get("allOf", ())):
        return False
    if "anyOf" in node and not any(_finite(option, known) for option in node["anyOf"]):
        return False
    types = _types(node)
    if _values(node) is not None or types - {"array", "object"}:
        return True
    properties = node.get("properties", {})
    if "object" in types and all(_finite(properties.get(name, True), known) for name in node.get("required", ())):
        return True
    need = node.get("minItems", 0)
    first = node.get("prefixItems", [])[:need]
    rest = [node.get("items", True)] if need > len(first) else []
    return "array" in types and all(_finite(item, known) for item in [*first, *rest])


def _types(node: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a schema's own ``type``, ``const`` and ``enum`` allow, integer as number."""
    given = node.get("type", [])
    names = frozenset("number" if t == "integer" else t for t in ([given] if isinstance(given, str) else given)) or _ALL
    values = _values(node)
    return names if values is None else names & {_type(v) for v in values}


def _values(node: dict[str, Any]) -> list[Any] | None:
    """The only values a schema allows, where it lists them."""
    return [node["const"]] if "const" in node else node.get("enum")


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _canonical(value: Any) -> Any:
    """Equal exactly for what JSON Schema calls equal: 1 is 1.0, and no boolean."""
    if isinstance(value, dict):
        return "object", frozenset((name, _canonical(v)) for name, v in value.items())
    return _type(value), tuple(_canonical(v) for v in value) if isinstance(value, list) else value
