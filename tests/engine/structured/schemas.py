"""Schemas for the tests of structured output: ones as people write them with documents that satisfy them, ones that
must be refused, and strategies that make more.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}},
    "required": ["value"],
    "additionalProperties": False,
}
_ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 20},
        "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
    },
    "required": ["street", "zip"],
    "additionalProperties": False,
}


def _kind(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, **properties},
        "required": ["kind", *properties],
        "additionalProperties": False,
    }


def _within(levels: int, schema: Any) -> Any:
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


# name: (schema, documents that satisfy it and must be possible)
WRITTEN: dict[str, tuple[Any, list[Any]]] = {
    "weather tool": (
        {
            "type": "object",
            "title": "get_weather",
            "description": "The weather somewhere",
            "properties": {
                "location": {"type": "string", "description": "City and country", "examples": ["Oslo, Norway"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["location"],
            "additionalProperties": False,
        },
        [{"location": "Oslo"}, {"location": 'a "b" \\ \n', "unit": "fahrenheit"}],
    ),
    "search tool": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 1, "maxLength": 12},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "filters": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 4}},
            },
            "required": ["query", "limit"],
        },
        [{"query": "q", "limit": 50, "filters": {"a": "b"}}, {"query": "ñ😀", "limit": 1}],
    ),
    "strict extraction": (
        {
            "$id": "https://example.com/person.json",
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": ["integer", "null"]},
                "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
                "address": {"$ref": "#/$defs/address"},
            },
            "required": ["name", "age", "email", "address"],
            "additionalProperties": False,
            "$defs": {"address": _ADDRESS, "unused": {"not": {}}},
        },
        [{"name": "", "age": None, "email": "a@b.c", "address": {"street": "x", "zip": "12345-6789"}}],
    ),
    "tree": (_TREE, [{"value": -3, "children": [{"value": 0}, {"value": 5, "children": []}]}]),
    "linked list": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "data": {"type": "number"},
                        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                    },
                    "required": ["data", "next"],
                }
            },
            "$ref": "#/$defs/node",
        },
        [{"data": 1.5, "next": {"data": -2e3, "next": None}}],
    ),
    "mutual recursion": (
        {
            "$defs": {
                "a/b~c": {
                    "type": "object",
                    "properties": {"x": {"$ref": "#/$defs/list"}},
                    "additionalProperties": False,
                },
                "list": {"type": "array", "items": {"$ref": "#/$defs/a~1b~0c"}, "maxItems": 2},
            },
            "type": "array",
            "items": {"$ref": "#/$defs/list"},
            "maxItems": 2,
        },
        [[[{"x": []}], []]],
    ),
    "reference into properties": (
        {
            "type": "object",
            "properties": {"first": {"type": "integer", "maximum": 9}, "second": {"$ref": "#/properties/first"}},
            "required": ["first", "second"],
            "additionalProperties": False,
        },
        [{"first": 9, "second": -1}],
    ),
    "a chain through properties that are named like keywords": (
        {"$defs": {f"d{i}": {"type": "object", "properties": {"const": {"$ref": f"#/$defs/d{i + 1}"}},
                             "required": ["const"], "additionalProperties": False} for i in range(9)}
         | {"d9": {"const": {"$ref": "x"}}}, "$ref": "#/$defs/d6"},
        [{"const": {"const": {"const": {"$ref": "x"}}}}],
    ),
    "tagged union": (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"cat": _kind("cat", lives={"type": "integer"}), "dog": _kind("dog", good={"type": "boolean"})},
        },
        [{"kind": "dog", "good": True}, {"kind": "cat", "lives": 9}],
    ),
    "union of types": ({"oneOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}, {"type": "null"}]}, ["", 0]),
    "union by what is required": (
        {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"oneOf": [_kind("a"), _kind("b", n={"type": "null"})]}}},
            "oneOf": [
                {"properties": {"x": {"type": "null"}, "list": True}, "required": ["x"], "additionalProperties": False},
                {"properties": {"y": {"type": "null"}, "list": True}, "required": ["y"], "additionalProperties": False},
            ],
        },
        [{"list": [{"kind": "a"}, {"kind": "b", "n": None}], "x": None}, {"y": None}],
    ),
    "nullable reference": (
        {"$defs": {"a": _ADDRESS}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
        [None, {"street": "", "zip": "00000"}],
    ),
    "reference with a sibling": (
        {"$defs": {"n": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/n", "maximum": 20, "description": "small"},
        [0, 20],
    ),
    "all of": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "string", "maxLength": 3}}, "required": ["b"]},
                {"properties": {"a": {"minimum": 10}}},
            ]
        },
        [{"a": 10, "b": ""}],
    ),
    "any of with siblings": (
        {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "additionalProperties": False,
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 3}, {"a": 2, "b": 3}],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "number"}, {"enum": ["N", "S"]}], "items": False, "minItems": 2},
        [[1.25, "N"]],
    ),
    "tuple and more": (
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}, "maxItems": 4},
        [[], [True], [False, None, None, None]],
    ),
    "matrix": (
        {"type": "array", "minItems": 2, "maxItems": 2,
         "items": {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "minItems": 2,
                   "maxItems": 2}},
        [[[0, 1], [-1, 0.5]]],
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
        [{"a": 1}, {"a": 1, "b": 2, "": 3}],
    ),
    "typed rest": (
        {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"],
         "additionalProperties": {"type": "boolean"}},
        [{"id": 1, "more": True}],
    ),
    "required but unnamed": (
        {"type": "object", "required": ["k"], "additionalProperties": {"type": "null"}},
        [{"k": None}],
    ),
    "names by pattern": (
        {"type": "object", "patternProperties": {"^s_": {"type": "string"}, "^n_": {"type": "number"}},
         "additionalProperties": False},
        [{"s_a": "x", "n_": 1}, {}],
    ),
    "names by pattern and by name": (
        {"type": "object", "properties": {"s_1": {"maxLength": 2}}, "patternProperties": {"^s_": {"type": "string"}}},
        [{"s_1": "ab", "other": 1}],
    ),
    "at least one": (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "minProperties": 1,
         "additionalProperties": False},
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
    ),
    "odd names": (
        {"type": "object", "properties": {'a"b': {"type": "null"}, "é\n": {"type": "null"}, "": {"type": "null"}},
         "required": ['a"b', "é\n", ""], "additionalProperties": False},
        [{'a"b': None, "é\n": None, "": None}],
    ),
    "enum of everything": (
        {"enum": [1, 2.5, "a", None, True, [1, {"b": []}], {"c": "d"}]},
        [2.5, [1, {"b": []}], True],
    ),
    "const object": ({"const": {"a": [1, "two", None]}}, [{"a": [1, "two", None]}]),
    "bounds": ({"type": "number", "exclusiveMinimum": 0, "maximum": 100}, [0.001, 100, 99.5]),
    "negative bounds": ({"type": "number", "minimum": -2.5, "exclusiveMaximum": -1.25}, [-2.5, -1.26]),
    "probability": ({"type": "number", "minimum": 0, "maximum": 1}, [0, 1, 0.25]),
    "integer bounds": ({"type": "integer", "exclusiveMinimum": -13, "exclusiveMaximum": 107}, [-12, 0, 106]),
    "cents": ({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 50}, [0.01, 49.99, 3]),
    "multiple": ({"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50}, [0, -49, 7]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "😀😀😀😀"]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d{1,3}$"}, ["AB-1", "ZZ-999"]),
    "pattern without anchors": ({"type": "string", "pattern": "ab", "maxLength": 10}, ["ab", "xxabx"]),
    "pattern with a slash": ({"type": "string", "pattern": "^[a-z]+/[a-z]+\\.(py|rs)$"}, ["a/b.py"]),
    "anything": ({}, [None, {"a": [1, "b"]}]),
    "true": (True, [1, [[]]]),
    "any object": ({"type": "object"}, [{}, {"a": {"b": []}}]),
    "any list": ({"type": "array"}, [[], [1, "a", [None]]]),
    "boolean": ({"type": "boolean"}, [True, False]),
    "neutral keywords": (
        {"type": "array", "uniqueItems": False, "items": {"type": "null", "nullable": False}, "x-order": 3},
        [[None, None]],
    ),
    "keywords that say nothing where they stand": (
        {"type": "array", "maxContains": 1, "minContains": 3, "if": False, "not": False, "additionalItems": True,
         "propertyNames": True, "$dynamicAnchor": "a",
         "items": {"then": False, "else": False, "dependentRequired": {}, "dependentSchemas": {}}},
        [[], [1, 1]],
    ),
    "dependencies on nothing": (
        {"type": "object", "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}, "propertyNames": {}},
        [{"a": 1}],
    ),
    "dates": (
        {"type": "object", "properties": {"d": {"type": "string", "format": "date"}, "t": {"format": "time"}},
         "required": ["d", "t"], "additionalProperties": False},
        [{"d": "2024-02-29", "t": "23:59:59.5+01:00"}, {"d": "1999-12-31", "t": 5}],
    ),
    **{
        f"format {name}": ({"type": "string", "format": name}, examples)
        for name, examples in {
            "date-time": ["2000-02-29T12:00:00Z", "2025-01-31T00:00:00.123-08:00"],
            "date": ["2400-02-29", "0001-01-01"],
            "time": ["00:00:00Z"],
            "duration": ["P1Y2M3D", "PT5S"],
            "email": ["some.one@example.com"],
            "hostname": ["a.example.com"],
            "ipv4": ["192.168.0.1"],
            "ipv6": ["::1", "2001:db8::8a2e:370:7334"],
            "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
            "uri": ["https://example.com/a?b=c#d"],
        }.items()
    },
    "invoice": (
        {
            "type": "object",
            "properties": {
                "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
                "issued": {"type": "string", "format": "date"},
                "lines": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 3,
                    "items": {
                        "type": "object",
                        "properties": {
                            "sku": {"type": "string", "minLength": 3, "maxLength": 8},
                            "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                            "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 10000},
                        },
                        "required": ["sku", "quantity", "price"],
                        "additionalProperties": False,
                    },
                },
                "paid": {"type": "boolean"},
            },
            "required": ["number", "issued", "lines"],
            "additionalProperties": False,
        },
        [{"number": "INV-0001", "issued": "2024-05-05", "lines": [{"sku": "abc", "quantity": 2, "price": 0.5}]}],
    ),
}  # fmt: skip

# (schema, what its message must say)
REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
    ({"properties": {"a/b": {"items": {"not": {"type": "null"}}}}}, "json: #/properties/a~1b/items: not"),
    ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if is"),
    ({"contains": {"type": "string"}}, "contains"),
    ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"unevaluatedItems": {"type": "null"}}, "unevaluatedItems"),
    ({"contentMediaType": "application/json"}, "contentMediaType"),
    ({"contentEncoding": "base64"}, "contentEncoding"),
    ({"contentSchema": {}}, "contentSchema"),
    ({"type": "string", "nullable": True}, "nullable"),
    ({"type": "string", "maxlength": 3}, "maxlength"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"$recursiveRef": "#"}, "$recursiveRef"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "$schema"),
    ({"$ref": "https://example.com/schema.json"}, "$ref"),
    ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "$ref"),
    ({"$ref": "#/$defs/missing"}, "$ref"),
    ({"$ref": "#/"}, "$ref"),
    ({"$ref": "#"}, "$ref"),
    ({"properties": {"a": {"$id": "https://example.com/other"}}}, "$id"),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "$ref"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref"),
    ({"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "$ref"),
    ({"items": [{"type": "null"}]}, "items"),
    ({"additionalItems": False}, "additionalItems"),
    ({"type": "string", "format": "unknown"}, "format"),
    ({"type": "string", "format": "idn-email"}, "format"),
    ({"type": "integer", "format": "int32"}, "format"),
    ({"type": "text"}, "type"),
    ({"type": "number", "exclusiveMinimum": True, "minimum": 1}, "exclusiveMinimum"),
    ({"const": 2**53 + 1}, "const"),
    ({"type": "integer", "minimum": 2**60}, "minimum"),
    ({"type": "number", "maximum": 1e300}, "maximum"),
    ({"type": "number", "minimum": 1e-20}, "minimum"),
    ({"type": "number", "multipleOf": 0}, "multipleOf"),
    ({"type": "number", "multipleOf": 0.07}, "multipleOf"),
    ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "exclusiveMaximum"),
    ({"allOf": [{"type": "number", "exclusiveMinimum": 3}, {"maximum": 3.25}]}, "exclusiveMinimum"),
    ({"const": "a\u0001"}, "const"),
    ({"enum": []}, "enum"),
    ({"enum": 3}, "enum"),
    ({"anyOf": []}, "anyOf"),
    ({"required": "a"}, "required"),
    ({"properties": []}, "properties"),
    ({"minLength": -1}, "minLength"),
    ({"maxItems": 10**9}, "maxItems"),
    ({"minLength": 2.5}, "minLength"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": True, "b": True}, "minProperties": 1}, "min/maxProperties"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ({"type": "string", "pattern": "[[a]&&b]"}, "pattern"),
    ({"type": "string", "pattern": "a*+"}, "pattern"),
    ({"type": "string", "pattern": "(a"}, "(a"),
    ({"prefixItems": [{}, {"pattern": "a++"}]}, "json: #/prefixItems/1/pattern: possessive"),
    ({"$defs": {"x": {"anyOf": [{}, {"if": {}, "else": {}}]}}, "$ref": "#/$defs/x"}, "json: #/$defs/x/anyOf/1: if is"),
    ({"contains": {}, "minContains": 2}, "json: #: contains"),
    ({"dependentSchemas": {"a": {"type": "null"}}}, "dependentSchemas"),
    ({"type": "string", "pattern": "a\\"}, "backslash"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "nsatisfiable"),
    ({"patternProperties": {"a": {"type": "null"}, "b": {"type": "integer"}}}, "disjoint"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "oneOf"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
    ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}]}, "oneOf"),
    ({"oneOf": [_within(14, {"type": "integer"}), _within(14, {"type": "number"})]}, "oneOf"),  # too deep to be proved
    (False, "false"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "nsatisfiable"),
    ({"properties": {"a": 3}}, "json: #/properties/a: 3"),
    ({"properties": {f"p{i}": {"type": "null"} for i in range(1001)}}, "properties"),
]

_NAMES = st.sampled_from(["a", "b", "name", "id", "é", "with space", 'q"uote', "Ünï", "x_1", "$ref", "type"])
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1000, 1000),
    st.sampled_from([0.5, -2.25, 10.0, 3.125]),
    st.text('abcé"\\\n /{}[],:😀', max_size=5),
)
_VALUES = st.recursive(
    _SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(_NAMES, v, max_size=2), max_leaves=4
)
_PATTERNS = ["^a+$", "^[a-z]{2,5}$", "\\d", "^(yes|no)$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^\\w{1,4}$", "b", "^.{3}$"]
_FORMATS = ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "regex"]
_UNSUPPORTED = [("uniqueItems", True), ("not", {"type": "null"}), ("minContains", 1), ("format", "color")]


def _keywords(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=options)


def _ordered(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Both, one, or none of a pair of bounds."""
    pairs = st.lists(values, min_size=2, max_size=2).map(sorted)
    return st.one_of(
        pairs.map(lambda v: {low: v[0], high: v[1]}), values.map(lambda v: {low: v}), values.map(lambda v: {high: v}),
        st.just({}),
    )  # fmt: skip


def _merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {k: v for part in found for k, v in part.items()})


def _numbers() -> st.SearchStrategy[dict[str, Any]]:
    low, high = st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])
    values = st.integers(-200, 200) | st.sampled_from([0.5, -0.5, 12.75, 99.99, -3.125, 0.001])
    bounds = st.tuples(low, high).flatmap(lambda names: _ordered(*names, values))
    kind = st.sampled_from(["integer", "number"]).map(lambda t: {"type": t})
    return _merged(kind, bounds, st.just({}) | st.sampled_from([2, 5, 0.5, 0.1, 12]).map(lambda m: {"multipleOf": m}))


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    shape = st.one_of(
        _ordered("minLength", "maxLength", st.integers(0, 12)),
        st.sampled_from(_PATTERNS).map(lambda p: {"pattern": p}),
        st.sampled_from(_FORMATS).map(lambda f: {"format": f}),
    )
    return _merged(st.just({"type": "string"}), shape)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(_NAMES, inner, max_size=4)

    def finish(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        required = st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([])
        return _merged(
            st.just({"type": "object", "properties": properties}),
            required.map(lambda names: {"required": names}),
            _keywords(additionalProperties=st.booleans() | inner),
            st.just({}) | _keywords(maxProperties=st.integers(0, 4), minProperties=st.integers(0, 2)),
        )

    names = st.sampled_from(["^x_", "^[0-9]+$", "z$"])
    patterned = st.tuples(names, inner).map(lambda p: {"type": "object", "patternProperties": {p[0]: p[1]}})
    return properties.flatmap(finish) | patterned


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return _merged(
        st.just({"type": "array"}),
        _ordered("minItems", "maxItems", st.integers(0, 3)),
        _keywords(items=inner | st.just(False), prefixItems=st.lists(inner, min_size=1, max_size=3)),
    )


def _unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    options = st.lists(inner, min_size=1, max_size=3)
    word = st.sampled_from(["anyOf", "anyOf", "oneOf", "allOf"])
    alone = st.tuples(word, options).map(lambda w: {w[0]: w[1]})
    return alone | _merged(inner.filter(lambda s: isinstance(s, dict)), alone)


@st.composite
def schemas(draw: st.DrawFn) -> Any:
    """Nested schemas of every supported kind, with references (recursive ones too) and now and then the unsupported."""
    leaves = st.one_of(
        _numbers(),
        _strings(),
        _VALUES.map(lambda v: {"const": v}),
        st.lists(_VALUES, min_size=1, max_size=4).map(lambda v: {"enum": v}),
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}, {}, True]),
        st.sampled_from(["#", "#/$defs/one", "#/$defs/two"]).map(lambda r: {"$ref": r}),
    )
    tree = st.recursive(leaves, lambda inner: _objects(inner) | _arrays(inner) | _unions(inner), max_leaves=8)
    root = draw(tree.filter(lambda s: isinstance(s, dict) and "$ref" not in s))
    extra = draw(st.sampled_from([*[None] * 15, *_UNSUPPORTED]))
    annotated = {"title": "T", **root} if draw(st.booleans()) else dict(root)
    if extra is not None:
        annotated[extra[0]] = extra[1]
    return {**annotated, "$defs": {"one": draw(tree), "two": draw(tree)}}
