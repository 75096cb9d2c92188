"""JSON schemas for structured output: rewritten into the part of Draft 2020-12 that the grammar library enforces fully.

llguidance passes over keywords that it does not know, reads some in another way than the standard, and has limits of
its own. What would let a document through that the schema forbids is rewritten where an equal form exists, and refused
by name where none does. Property order is kept: it is the order in which properties are generated.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.engine.structured.schemas.patterns import FORMAT_PATTERNS, FORMATS, check_regex
from graphllm.engine.structured.schemas.proofs import Exclusion, has_end, has_loop

_FIELD = "structured_outputs.json"
_MAX_TEXT, _MAX_DEPTH, _MAX_COUNT = 200_000, 100, 100_000
_MAX_PROPERTIES = 1000  # of one object; compiling takes a time that grows with their square
_MAX_PATTERNS = 100  # likewise: each of patternProperties is compared with each
_MAX_DEFINITIONS = 1000  # that $ref names; likewise
_MAX_WHOLE = 2**53  # numbers become 64-bit floats inside the library
_MAX_DECIMALS = 15
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

_ANNOTATIONS = (
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "default", "definitions",
    "deprecated", "description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly",
)  # fmt: skip
# Values with which a keyword says nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "nullable": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}), "not": (False,), "additionalItems": (True, {}),
}  # fmt: skip
_DEPENDENT = ("dependencies", "dependentRequired", "dependentSchemas")
# Keywords that say nothing without any of these others.
_NEED = {
    "minContains": ("contains",), "maxContains": ("contains",), "if": ("then", "else"), "then": ("if",),
    "else": ("if",),
}  # fmt: skip
_REMEDIES = {
    "nullable": 'write type: [..., "null"]',
    "additionalItems": "write prefixItems and items",
    "dependencies": "write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "if": "write the cases as anyOf",
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
    "unevaluatedProperties": "write additionalProperties",
    "unevaluatedItems": "write items",
}
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[67]|draft/20(19-09|20-12))/schema#?$")

_MAX_HOSTNAME = 253
_MAX_MERGED = 8  # the time to merge regular expressions and choices doubles with each: 12 take 10 ms, 22 take 10 s


class RewrittenSchema(NamedTuple):
    """schema: in the form described above, everything that ``$ref`` reaches under ``$defs``. cheap: certainly to
    compile, for its length: not many expressions and choices can come together in one value."""

    schema: Any
    cheap: bool


def rewrite_schema(schema: object, closed: bool = False) -> RewrittenSchema:
    """The schema as the library takes it.

    closed: objects that list properties and say nothing of others allow no others. Raises ConfigError naming the place
    (a JSON pointer), the keyword and a remedy.
    """
    if _depth(schema) > _MAX_DEPTH:
        raise ConfigError(f"{_FIELD}: nested deeper than {_MAX_DEPTH} levels; move parts of it into $defs")
    rewriter = _Rewriter(schema, closed)
    plain = rewriter.run()
    return RewrittenSchema(plain, not rewriter.merges or rewriter.mergeable <= _MAX_MERGED)


def parse_schema(schema: str | dict[str, Any]) -> Any:
    """The plain JSON value of a schema given as text or as an object. Raises ConfigError for anything else."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if len(text) > _MAX_TEXT:
            raise ConfigError(f"{_FIELD}: {len(text)} characters, more than {_MAX_TEXT}; give a smaller schema")
        return json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{_FIELD}: not a JSON schema ({e}); give an object or its JSON text") from e


class _Rewriter:
    """One schema's rewriting. Sub-schemas that ``$ref`` names are rewritten when first referred to."""

    def __init__(self, root: Any, closed: bool) -> None:
        self.root, self.closed = root, closed
        self.names: dict[str, str] = {}  # of the definitions, by JSON pointer
        self.definitions: dict[str, Any] = {}
        self.unions: list[tuple[str, list[Any]]] = []  # what oneOf said, to be proved
        self.numbers: list[tuple[str, dict[str, Any]]] = []
        self.merges = False  # whether what holds for one value can come from several places
        self.mergeable = 0  # regular expressions and choices

    def run(self) -> Any:
        plain = self.schema(self.root, "")
        pending = dict(self.names)
        while pending:
            for pointer, name in pending.items():
                self.definitions[name] = self.schema(self.resolve(pointer), pointer)
            pending = {p: n for p, n in self.names.items() if n not in self.definitions}
        self.check_numbers()
        exclusion = Exclusion(self.definitions)
        for path, options in self.unions:
            for i, j in itertools.combinations(range(len(options)), 2):
                if not exclusion.disjoint(options[i], options[j]):
                    raise refuse(
                        path, "oneOf", f"options {i} and {j} are not known to exclude each other", "write anyOf"
                    )
        if has_loop(self.definitions):
            raise refuse("", "$ref", "leads back to itself for the same value", "leave out that option")
        if not has_end(plain, self.definitions):
            raise refuse("", "$ref", "makes a value that requires itself without end", "make the property optional")
        if not self.definitions:
            return plain
        return {**plain, "$defs": self.definitions}

    def schema(self, node: Any, path: str) -> Any:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise refuse(path, "", f"{_short(node)} is no schema", "give an object, true or false")
        plain: dict[str, Any] = {}
        extra: list[Any] = []  # further conditions for keywords that are already taken
        for keyword, value in node.items():
            if keyword in _ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            if _says_nothing(keyword, value, node):
                continue
            if keyword == "$schema":
                if not isinstance(value, str) or not _DIALECT.match(value):
                    raise refuse(path, keyword, f"{_short(value)} is not supported", "write Draft 2020-12")
            elif keyword == "$id":
                if path:
                    raise refuse(path, keyword, "is supported at the root only", "leave it out")
            elif keyword == "oneOf":
                options = self.schemas(value, path, keyword)
                kind = {"type": node["type"]} if "type" in node else {}
                self.unions.append((path, [{**kind, **o} if isinstance(o, dict) else o for o in options]))
                extra.append({"anyOf": options})
            elif keyword == "format":
                self.add_format(value, path, plain, extra)
            elif keyword in self.handlers:
                plain[keyword] = self.handlers[keyword](self, value, path, keyword)
            else:
                raise refuse(path, keyword, "is not supported", _REMEDIES.get(keyword, "leave it out"))
        if self.closed and "properties" in plain:
            plain.setdefault("additionalProperties", False)
        self.check_object(plain, path)
        self.numbers.append((path, plain))
        chosen = "oneOf" in node
        joined = chosen or "anyOf" in plain or "$ref" in plain
        self.merges |= "allOf" in plain or "patternProperties" in plain or (joined and len(plain) + chosen > 1)
        self.mergeable += len(plain.get("patternProperties", ())) + sum(
            name in node for name in ("pattern", "format", "anyOf", "oneOf")
        )
        if extra:
            plain["allOf"] = [*plain.get("allOf", ()), *extra]
        return plain

    def schemas(self, value: Any, path: str, keyword: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise refuse(path, keyword, f"is {_short(value)}", "give a list of schemas")
        return [self.schema(item, f"{path}/{keyword}/{i}") for i, item in enumerate(value)]

    def named_schemas(self, value: Any, path: str, keyword: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(path, keyword, f"is {_short(value)}", "give an object of schemas")
        most = _MAX_PATTERNS if keyword == "patternProperties" else _MAX_PROPERTIES
        if len(value) > most:
            raise refuse(path, keyword, f"has {len(value)} entries", f"give at most {most}")
        if keyword == "patternProperties":
            for pattern in value:
                check_regex(pattern, f"{_FIELD}: #{path}/{keyword}")
        return {name: self.schema(item, f"{path}/{keyword}/{_escape(name)}") for name, item in value.items()}

    def subschema(self, value: Any, path: str, keyword: str) -> Any:
        if keyword == "items" and isinstance(value, list):
            raise refuse(path, keyword, "is a list, which Draft 2020-12 does not have", "write prefixItems")
        return self.schema(value, f"{path}/{keyword}")

    def reference(self, value: Any, path: str, keyword: str) -> str:
        pointer = value[1:] if isinstance(value, str) and value.startswith("#") else None
        if pointer is None or (pointer and not pointer.startswith("/")) or "%" in pointer:
            raise refuse(path, keyword, f"{_short(value)} is not supported", 'refer to "#/$defs/..." in this schema')
        self.resolve(pointer)
        if pointer not in self.names and len(self.names) == _MAX_DEFINITIONS:
            raise refuse(path, keyword, "is one reference too many", f"refer to at most {_MAX_DEFINITIONS} places")
        return "#/$defs/" + self.names.setdefault(pointer, f"d{len(self.names)}")

    def resolve(self, pointer: str) -> Any:
        node = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            inside = node.get(key) if isinstance(node, dict) else _item(node, key)
            if inside is None:
                raise ConfigError(f"{_FIELD}: $ref #{pointer:.200}: there is nothing there; define it under $defs")
            node = inside
        return node

    def types(self, value: Any, path: str, keyword: str) -> Any:
        names = value if isinstance(value, list) else [value]
        if not names or not all(name in _TYPES for name in names):
            raise refuse(path, keyword, f"is {_short(value)}", f"give one or more of {', '.join(_TYPES)}")
        return value

    def count(self, value: Any, path: str, keyword: str) -> int:
        self.check_number(value, path, keyword)
        if value != int(value) or value < 0:
            raise refuse(path, keyword, f"is {value}", "give a whole number from 0")
        if value > _MAX_COUNT:
            raise refuse(path, keyword, f"is {value}, above the limit of {_MAX_COUNT}", "give a smaller one")
        return int(value)

    def bound(self, value: Any, path: str, keyword: str) -> Any:
        self.check_number(value, path, keyword)
        if -int(Decimal(repr(value)).as_tuple().exponent) > _MAX_DECIMALS:
            raise refuse(path, keyword, f"is {value!r}", f"give at most {_MAX_DECIMALS} decimals")
        return value

    def multiple_of(self, value: Any, path: str, keyword: str) -> Any:
        self.bound(value, path, keyword)
        if value <= 0:
            raise refuse(path, keyword, f"is {value!r}", "give a number above 0")
        coefficient, decimals = float(value), 0
        while coefficient != int(coefficient):  # as the library does, with its rounding
            coefficient, decimals = coefficient * 10, decimals + 1
        if coefficient > 2**32 - 1 or Decimal(coefficient).scaleb(-decimals) != Decimal(repr(value)):
            raise refuse(path, keyword, f"is {value!r}, too precise", "give fewer digits")
        return value

    def check_number(self, value: Any, path: str, keyword: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(path, keyword, f"is {_short(value)}", "give a number")
        if not abs(value) <= _MAX_WHOLE:  # infinite ones too
            raise refuse(path, keyword, f"is {_short(value)}, not exact in 64 bits", "give at most 2**53")

    def pattern(self, value: Any, path: str, keyword: str) -> str:
        return check_regex(value, f"{_FIELD}: #{path}/{keyword}")

    def required(self, value: Any, path: str, keyword: str) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise refuse(path, keyword, f"is {_short(value)}", "give a list of property names")
        return value

    def constant(self, value: Any, path: str, keyword: str) -> Any:
        for scalar in _scalars(value):
            if isinstance(scalar, str) and re.search(r"[^\b\f\n\r\t\x20-\x7e\x80-\U0010ffff]|[\ud800-\udfff]", scalar):
                raise refuse(path, keyword, f"{_short(scalar)} has a control character", "leave it out")
            if isinstance(scalar, (int, float)) and not isinstance(scalar, bool):
                self.check_number(scalar, path, keyword)
        return value

    def enumeration(self, value: Any, path: str, keyword: str) -> Any:
        if not isinstance(value, list) or not value:
            raise refuse(path, keyword, f"is {_short(value)}", "give a list of values")
        return self.constant(value, path, keyword)

    def add_format(self, value: Any, path: str, plain: dict[str, Any], extra: list[Any]) -> None:
        if isinstance(value, str) and value in FORMAT_PATTERNS:
            extra.append({"pattern": FORMAT_PATTERNS[value]})
        elif isinstance(value, str) and value in FORMATS:
            plain["format"] = value
            if value == "hostname":
                extra.append({"maxLength": _MAX_HOSTNAME})
        else:
            known = ", ".join(sorted(FORMATS | set(FORMAT_PATTERNS)))
            raise refuse(path, "format", f"{_short(value)} is not supported", f"leave it out, or use one of {known}")

    handlers: dict[str, Callable[[_Rewriter, Any, str, str], Any]] = {  # noqa: RUF012 (a constant table)
        **dict.fromkeys(("anyOf", "allOf", "prefixItems"), schemas),
        **dict.fromkeys(("properties", "patternProperties"), named_schemas),
        **dict.fromkeys(("items", "additionalProperties"), subschema),
        **dict.fromkeys(
            ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), count
        ),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bound),
        "$ref": reference, "type": types, "multipleOf": multiple_of, "pattern": pattern, "required": required,
        "enum": enumeration, "const": constant,
    }  # fmt: skip

    def check_object(self, plain: dict[str, Any], path: str) -> None:
        """Names beyond ``properties`` can be generated twice, and then count once."""
        if plain.get("minProperties", 0) - len(set(plain.get("required", ()))) > 1:
            raise refuse(path, "minProperties", "is supported up to one more than required", "list more as required")

    def check_numbers(self) -> None:
        """Two mistakes of the library: (0, 0.5] includes 0, and the common multiple of two multipleOf overflows."""
        for sign, low, ends in (
            (1, "exclusiveMinimum", ("maximum", "exclusiveMaximum")),
            (-1, "exclusiveMaximum", ("minimum", "exclusiveMinimum")),
        ):
            everywhere = sorted(sign * a[end] for _, a in self.numbers for end in ends if end in a)
            for path, a in self.numbers:
                start = sign * a.get(low, -1 * sign)
                if start < 0 or start != int(start) or a.get("type") == "integer":
                    continue
                others = everywhere if self.merges else sorted(sign * a[end] for end in ends if end in a)
                after = bisect.bisect_right(others, start)
                if after < len(others) and others[after] < start + 1:
                    raise refuse(path, low, f"{a[low]} is less than 1 from {ends[0]}", f"give {low} with decimals")
        multiples = {Decimal(repr(a["multipleOf"])) for _, a in self.numbers if "multipleOf" in a}
        if self.merges and len(multiples) > 1:
            scale = max(-int(m.normalize().as_tuple().exponent) for m in multiples)
            whole = [int(m.scaleb(max(scale, 0))) for m in multiples]
            if math.lcm(*whole) * max(whole) >= 2**32:
                raise refuse("", "multipleOf", "values are too large to be combined", "give smaller ones")


def refuse(path: str, keyword: str, problem: str, remedy: str) -> ConfigError:
    """The error for one place of the schema."""
    return ConfigError(f"{_FIELD}: {f'#{path}':.200}: {f'{keyword:.80} ' if keyword else ''}{problem:.200}; {remedy}")


def _says_nothing(keyword: str, value: Any, node: dict[str, Any]) -> bool:
    """Whether a schema means the same without this keyword."""
    if keyword in _DEPENDENT:
        return isinstance(value, dict) and all(v in ([], {}) or v is True for v in value.values())
    if keyword in _NEED:
        return not node.keys() & _NEED[keyword]
    return any(value == v and type(value) is type(v) for v in _NEUTRAL.get(keyword, ()))


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scalars(item)
    else:
        yield value


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, (dict, list))]:
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
        depth += 1
    return depth


def _item(node: Any, key: str) -> Any:
    index = int(key) if re.fullmatch("[0-9]{1,9}", key) else -1
    return node[index] if isinstance(node, list) and 0 <= index < len(node) else None


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
