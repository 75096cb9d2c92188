"""Structured output: whatever is sampled under the masks satisfies the request, by the judgement of other libraries."""

from __future__ import annotations

import ast
import json
import re
import resource
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import StructuredOutputsParams as Spec
from graphllm.engine.requests.request import QueueFullError
from graphllm.engine.structured.backends.llguidance import GrammarCompiler
from graphllm.engine.structured.source import GrammarError
from tests.engine.structured.grammar_kit import EMBEDDED, Kit, is_bounded, make_kit, sample, violation
from tests.engine.structured.schemas import REFUSED, WRITTEN, schemas
from tests.tiers import draws


@pytest.fixture(scope="module")
def embedded() -> Kit:
    return make_kit(EMBEDDED, stop=2, more=0)


@pytest.fixture(scope="module")
def tiny(checkpoint: Path) -> Kit:
    """A model whose vocabulary is padded beyond its tokenizer's."""
    return make_kit(checkpoint, stop=1, more=37)


def judge(kit: Kit, schema: Any, seed: int, counts: Counter[str], documents: int = 2) -> None:
    """Sample documents of a schema that is not refused, and have each judged."""
    counts["schemas"] += 1
    grammar = None
    try:
        grammar = kit.compiler.compile(Spec(json=json.dumps(schema)))
    except ConfigError as e:
        message = str(e)
        counts["refused"] += 1
        counts["refused: " + message.split(":")[-1].split(";")[0].strip()[:30]] += 1
    else:
        message = "structured_outputs.json: "
    assert message.startswith("structured_outputs.json: ")
    if grammar is None:
        return
    random = np.random.default_rng(seed)
    for _ in range(documents):
        tokens, ended = sample(kit, grammar, random)
        counts["documents" if ended else "unfinished"] += 1
        if ended:
            text = kit.text(tokens)
            assert violation(schema, text) is None, f"{text!r} of {json.dumps(schema)}"
        else:
            assert grammar.matcher().validate(tokens) == len(tokens)


def report(counts: Counter[str]) -> None:
    print(dict(counts))
    assert counts["unfinished"] <= 0.05 * counts["documents"]
    assert counts["documents"] >= counts["schemas"] - counts["refused"]


@pytest.mark.parametrize("name", ["embedded", "tiny"])
def test_documents_of_written_schemas(name: str, request: pytest.FixtureRequest) -> None:
    kit, counts = request.getfixturevalue(name), Counter[str]()
    for seed, (schema, _) in enumerate(WRITTEN.values()):
        judge(kit, schema, seed, counts, documents=4)
    assert not counts["refused"]
    report(counts)


def _generated(kit: Kit, examples: int) -> Counter[str]:
    counts = Counter[str]()

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(schemas(), st.integers(0, 2**32))
    def check(schema: Any, seed: int) -> None:
        refused = counts["refused"]
        judge(kit, schema, seed, counts)
        assume(counts["refused"] == refused)  # what is drawn depends on imported modules: draw until enough are taken

    check()
    report(counts)
    return counts


def test_documents_of_generated_schemas(embedded: Kit) -> None:
    counts = _generated(embedded, draws(30, 100))
    assert counts["schemas"] - counts["refused"] >= draws(25, 90)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedded", "tiny"])
def test_documents_of_many_generated_schemas(name: str, request: pytest.FixtureRequest) -> None:
    _generated(request.getfixturevalue(name), 2000)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_satisfies_a_schema_is_possible(name: str, embedded: Kit) -> None:
    schema, examples = WRITTEN[name]
    grammar = embedded.compiler.compile(Spec(json=json.dumps(schema)))
    dense = embedded.compiler.compile(Spec(json=json.dumps(schema), disable_any_whitespace=True))
    assert examples
    for example in examples:
        assert violation(schema, json.dumps(example)) is None  # the test's own example
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(example, ensure_ascii=False, separators=separators)
            tokens = [*embedded.ids(text), embedded.stop]
            assert grammar.matcher().validate(tokens) == len(tokens), text
            spaced = text != json.dumps(example, ensure_ascii=False, separators=(",", ":"))
            assert (dense.matcher().validate(tokens) == len(tokens)) is not spaced, text


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_by_name(schema: Any, named: str, embedded: Kit) -> None:
    for given_as in (json.dumps(schema), schema):
        if isinstance(given_as, bool):
            continue
        with pytest.raises(ConfigError, match=re.escape(named)) as refusal:
            embedded.compiler.check(Spec(json=given_as))
        assert str(refusal.value).startswith("structured_outputs.json: ")
        assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"minimum": NaN}', '{"maximum": 1e999}', "[" * 5000 + "]" * 5000, '{"a": "' + "x" * 300_000 + '"}'],
)
def test_what_is_no_schema(text: str, embedded: Kit) -> None:
    with pytest.raises(ConfigError, match=r"structured_outputs\.json: "):
        embedded.compiler.check(Spec(json=text))


def test_nesting_is_bounded(embedded: Kit) -> None:
    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(levels):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        return schema

    grammar = embedded.compiler.compile(Spec(json=nested(45)))
    tokens = [*embedded.ids('{"a":' * 45 + "1" + "}" * 45), embedded.stop]
    assert grammar.matcher().validate(tokens) == len(tokens)
    with pytest.raises(ConfigError, match="nested deeper"):
        embedded.compiler.check(Spec(json=nested(60)))


@pytest.mark.parametrize(
    ("schema", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061":"x"}'),  # another spelling of the name
        ({"properties": {"a": {"type": "integer"}}}, '{"b":1,"a":"x"}'),
        ({"properties": {"a": True}}, '{"a":1,"a":2}'),
        ({"format": "date"}, '"2023-02-29"'),
        ({"format": "date"}, '"1900-02-29"'),
        ({"type": "string", "minLength": 2}, '"\\n"'),
        ({"type": "number", "maximum": 5}, "5.1"),
        ({"type": "number", "maximum": 5}, "1e9"),
    ],
)
def test_what_breaks_a_schema_is_impossible(schema: Any, bad: str, embedded: Kit) -> None:
    assert violation(schema, bad) is not None or bad == '{"a":1,"a":2}'
    tokens = [*embedded.ids(bad), embedded.stop]
    assert embedded.compiler.compile(Spec(json=schema)).matcher().validate(tokens) < len(tokens)


def test_number_bounds_against_decimals(tiny: Kit) -> None:
    """Every accepted literal near the bounds is within them."""
    places = [-100, -12.25, -1.5, -1, -0.001, 0, 0.25, 1, 9.99, 10, 100]
    wrong, accepted = [], 0
    for low in places:
        for high in (v for v in places if v > low):
            for kinds in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
                schema = {"type": "number", kinds[0]: low, kinds[1]: high}
                try:
                    grammar = tiny.compiler.compile(Spec(json=schema))
                except ConfigError:
                    continue
                near = {
                    str(Decimal(repr(v)) + Decimal(d)) for v in (low, high, 0) for d in ("0", ".001", "-.1", "1", "-9")
                }
                for text in near | {"-0", "0.0", "-0.0", "1.0", "10.00"}:
                    tokens = [*tiny.ids(text), tiny.stop]
                    if grammar.matcher().validate(tokens) == len(tokens):
                        accepted += 1
                        if violation(schema, text):
                            wrong.append((schema, text))
    assert not wrong
    assert accepted > 200


REGEXES = [
    "[a-z]{3}-[0-9]{2,4}", "(yes|no|maybe)", "^abc$", "a*b+c?", r"\d{4}-\d\d", r"[A-Z]\w{0,5}( \w{1,3})*", "(?i)hello",
    r"\(\d{3}\) \d{3}-\d{4}", "[^\\n]{5,9}", "é+|😀", "(a|b)*a(a|b){6}", "", r"/\*[a-z ]*\*/", r'"(\\.|[^"\\])*"',
    "(?P<x>a)b|c$", r"[\d.]+,[^\d]\D",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("name", ["embedded", "tiny"])
def test_regex(regex: str, name: str, request: pytest.FixtureRequest) -> None:
    kit = request.getfixturevalue(name)
    grammar, random, ended = kit.compiler.compile(Spec(regex=regex)), np.random.default_rng(3), 0
    for _ in range(10):
        tokens, end = sample(kit, grammar, random)
        ended += end
        assert not end or re.fullmatch(regex, kit.text(tokens))
    assert ended >= 8


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [(r"\p{L}+", "aéЖ文", "1"), (r"[\p{L}\d]+", "é1", "-"), (r"\P{L}+", "1-", "é"), (r"\p{Script=Greek}*x", "βx", "ax"),
     (r"\u{41}+", "AAA", "B"), (r"\u{1F600}{2}", "😀😀", "😀"), (r"[\u{41}-\u{43}]{2,}", "ABC", "D"),
     (r"\x{41}?b", "Ab", "x")],
)  # fmt: skip
def test_regex_with_braces_of_an_escape(regex: str, good: str, bad: str, embedded: Kit) -> None:
    pattern = {"type": "string", "pattern": f"^(?:{regex})$"}
    for spec, texts in ((Spec(regex=regex), (good, bad)), (Spec(json=pattern), (f'"{good}"', f'"{bad}"'))):
        for text in texts:
            tokens = [*embedded.ids(text), embedded.stop]
            found = embedded.compiler.compile(spec).matcher().validate(tokens) == len(tokens)
            assert found == (text == texts[0])
    for possessive in (regex + "+", regex.replace("+", "++")):
        if possessive.count("+") > 1:
            with pytest.raises(ConfigError, match="possessive"):
                embedded.compiler.check(Spec(regex=possessive))


@pytest.mark.parametrize(
    "regex",
    [
        "(?=a)b",
        r"(a)\1",
        r"a\b",
        "[a&&b]",
        "[[:alpha:]]",
        "a++",
        "(",
        "(?U)a*",
        "a{,3}",
        "a\ud800",
        "a\\",
        "a)|(b",
    ],
)
def test_regex_refused(regex: str, embedded: Kit) -> None:
    with pytest.raises(ConfigError, match=r"structured_outputs.regex: "):
        embedded.compiler.check(Spec(regex=regex))


@pytest.mark.parametrize(
    "regex",
    ["((a{0,100}){0,100}){0,100}", "a{1000000}", "(a?){500}a{500}", "(.*a){40}", "(x+x+)+y", "(a|b)*a(a|b){500}",
     "(" * 3000 + ")" * 3000, "[a-z]*" * 3000, "x" * 300_000],
)  # fmt: skip
def test_exploding_regexes_take_bounded_time(regex: str, embedded: Kit) -> None:
    assert is_bounded(embedded, regex)


def test_choice(embedded: Kit) -> None:
    choices = ["red", "reddish", 'with "quotes"', "two\nlines", "é😀", "C:\\x", "\x7f\u2028"]
    grammar, random = embedded.compiler.compile(Spec(choice=choices)), np.random.default_rng(0)
    outputs = Counter(embedded.text(sample(embedded, grammar, random)[0]) for _ in range(200))
    assert set(outputs) == set(choices)


def test_masks_are_exact(embedded: Kit) -> None:
    """At every prefix the mask is the set of tokens that some choice goes on with, found by trying all of them."""
    choices = ["the cat", "the dog sat", "them", "a"]
    grammar = embedded.compiler.compile(Spec(choice=choices))
    size = embedded.tokenizer.get_vocab_size()
    texts = [embedded.tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    for choice in choices:
        matcher, done = grammar.matcher(), ""
        for token in [*embedded.ids(choice), embedded.stop]:
            fits = [bool(t) and any(c.startswith(done + t) for c in choices) for t in texts]
            fits[embedded.stop] = done in choices
            assert np.flatnonzero(embedded.bits(matcher)).tolist() == np.flatnonzero(fits).tolist()
            matcher.advance(token)
            done += texts[token]


ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""
ARITHMETIC_GBNF = """
root ::= product (("+" | "-") product)*  # GBNF for the same
product ::= atom ("*" atom)*
atom ::= [1-9] [0-9]{0,3} | "(" root ")"
"""


@pytest.mark.parametrize("source", [ARITHMETIC, ARITHMETIC_GBNF], ids=["lark", "gbnf"])
def test_grammar(source: str, embedded: Kit) -> None:
    grammar, random = embedded.compiler.compile(Spec(grammar=source)), np.random.default_rng(0)
    seen = set()
    for _ in range(30):
        tokens, ended = sample(embedded, grammar, random)
        text = embedded.text(tokens)
        if not ended:  # parentheses can open faster than they close
            continue
        assert re.fullmatch(r"[0-9+*()-]+", text)
        for node in ast.walk(ast.parse(text, mode="eval")):
            allowed = (ast.Expression, ast.BinOp, ast.Constant, ast.Add, ast.Sub, ast.Mult)
            assert isinstance(node, allowed), text
            assert not isinstance(node, ast.Constant) or 1 <= node.value <= 9999
        seen.add(text)
    assert len(seen) >= 15
    for text in ("1+2*(3-4)", "((9999))"):
        assert grammar.matcher().validate([*embedded.ids(text), embedded.stop]) == len(embedded.ids(text)) + 1


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("", "grammar"), ("start: a", "a"), ('begin: "a"', "start"), ('start: %json {"not": {}}', "%json"),
        ('start[temperature=0.5]: /a*/', "temperature"), ("start: " + "(" * 9000, "grammar"),
        ("root ::= .", "'.'"), ('root ::= "a', "end of input"), ("root ::= a", "not found"), ('root ::= [a&&b]', "&&"),
        ('x ::= "a"', "root"), ('root ::= "\\u0041"', "grammar"), ("start: A\nA: /a/ & /b/", "operator &"),
        ("start: <[4096]>", "4096"),
    ],
)  # fmt: skip
def test_grammar_refused(source: str, named: str, embedded: Kit) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as refusal:
        embedded.compiler.check(Spec(grammar=source))
    assert str(refusal.value).startswith("structured_outputs.grammar: ")


def test_json_object(embedded: Kit, tiny: Kit) -> None:
    for kit in (embedded, tiny):
        grammar, random = kit.compiler.compile(Spec(json_object=True)), np.random.default_rng(0)
        documents = [kit.text(tokens) for tokens, ended in (sample(kit, grammar, random) for _ in range(30)) if ended]
        assert len(documents) >= 25
        assert all(isinstance(json.loads(text), dict) for text in documents)


def test_whitespace(embedded: Kit) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    accepts = {
        pattern: [
            text
            for text in ("[1,2]", "[1, 2]", "[1,  2]", "[1,\n2]", "[\n  1\n]", "[\n\n1]", " []", "[]\n")
            if _accepts(embedded, schema, text, pattern)
        ]
        for pattern in (None, "[ ]?", "", "  ", "[ \\n]*")
    }
    assert accepts == {
        None: ["[1,2]", "[1, 2]", "[1,\n2]", "[\n  1\n]"], "[ ]?": ["[1,2]", "[1, 2]"], "": ["[1,2]"],
        "  ": ["[1,2]", "[1,  2]"],
        "[ \\n]*": ["[1,2]", "[1, 2]", "[1,  2]", "[1,\n2]", "[\n  1\n]", "[\n\n1]"],
    }  # fmt: skip
    for pattern in ("[ x]*", r"\s", "a", "[", "a++"):
        with pytest.raises(ConfigError, match=r"structured_outputs\.whitespace_pattern: "):
            embedded.compiler.check(Spec(json=schema, whitespace_pattern=pattern))
    with pytest.raises(ConfigError, match="whitespace_pattern"):
        embedded.compiler.check(Spec(json=schema, whitespace_pattern=" ", disable_any_whitespace=True))


def _accepts(kit: Kit, schema: Any, text: str, pattern: str | None = None, closed: bool = False) -> bool:
    spec = Spec(json=schema, whitespace_pattern=pattern, disable_additional_properties=closed)
    tokens = [*kit.ids(text), kit.stop]
    return kit.compiler.compile(spec).matcher().validate(tokens) == len(tokens)


def test_closed_objects(embedded: Kit) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "null"}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": inner}}
    for text in ('{"c":1}', '{"a":{"c":1}}'):
        assert _accepts(embedded, schema, text)
        assert not _accepts(embedded, schema, text, closed=True)
    assert _accepts(embedded, schema, '{"a":{"b":null}}', closed=True)
    assert _accepts(embedded, {"type": "object"}, '{"c":1}', closed=True)


def test_rollback_and_validate(embedded: Kit) -> None:
    """Going back gives the masks of before; validate says what advance would do."""
    random = np.random.default_rng(5)
    for name in ("invoice", "tree", "strict extraction", "format uri"):
        grammar = embedded.compiler.compile(Spec(json=WRITTEN[name][0]))
        tokens, ended = sample(embedded, grammar, random)
        tokens += [embedded.stop] * ended
        matcher, masks = grammar.matcher(), []
        for token in tokens:
            masks.append(embedded.bits(matcher))
            matcher.advance(token)
        for length in (1, 3, len(tokens) // 2):
            matcher.rollback(length)
            assert not matcher.finished
            assert (embedded.bits(matcher) == masks[len(tokens) - length]).all()
            assert matcher.validate(tokens[-length:]) == length
            for token in tokens[-length:]:
                matcher.advance(token)
            assert matcher.finished == ended
        for at in random.integers(0, len(tokens), 20):
            matcher.rollback(len(tokens) - int(at))
            other = int(np.flatnonzero(~masks[at])[random.integers(5)])
            assert matcher.validate([other, *tokens[at:]]) == 0
            assert matcher.validate([*tokens[at:], embedded.stop, embedded.stop]) == len(tokens) - at + (
                not ended and 0
            )
            assert (embedded.bits(matcher) == masks[at]).all()
            for token in tokens[at:]:
                matcher.advance(token)


def test_end_of_output(embedded: Kit) -> None:
    matcher = embedded.compiler.compile(Spec(regex="ab?")).matcher()
    a, b = (embedded.ids(c)[0] for c in "ab")
    assert not embedded.bits(matcher)[embedded.stop]
    matcher.advance(a)
    assert set(np.flatnonzero(embedded.bits(matcher))) == {b, embedded.stop}
    matcher.advance(b)
    assert np.flatnonzero(embedded.bits(matcher)).tolist() == [embedded.stop]
    assert not matcher.finished
    matcher.advance(embedded.stop)
    assert matcher.finished
    assert matcher.validate([embedded.stop]) == 0
    assert np.flatnonzero(embedded.bits(matcher)).tolist() == [embedded.stop]
    with pytest.raises(GrammarError, match="after the end"):
        matcher.advance(embedded.stop)


@pytest.mark.parametrize("token", [-1, 0, 2, 68, 4095, 4096, 10**12])
def test_tokens_that_may_not_come(token: int, embedded: Kit) -> None:
    matcher = embedded.compiler.compile(Spec(regex="[0-9]+")).matcher()
    assert matcher.validate([token]) == 0
    with pytest.raises(GrammarError, match=r"\w"):
        matcher.advance(token)


def test_only_plain_tokens_of_the_tokenizer(tiny: Kit) -> None:
    """Anything may come: but no special token, and nothing of the padding; also where the tokenizer has more tokens."""
    size = tiny.tokenizer.get_vocab_size()
    special = {tiny.tokenizer.token_to_id(t) for t in ("<s>", "</s>", "<|user|>", "<|system|>", "<|bot|>")}
    # A token that is whole characters; others may begin one, which is not looked at here.
    whole = [i not in special and "\ufffd" not in tiny.tokenizer.decode([i]) for i in range(size)]
    bits = tiny.bits(tiny.compiler.compile(Spec(regex="(?s:.*)")).matcher())
    assert bits[:size][whole].all()
    assert bits[tiny.stop]
    assert not bits[list(special - {tiny.stop})].any()
    assert not bits[size:].any()
    smaller = tiny._replace(compiler=GrammarCompiler(tiny.compiler._folder, 300, frozenset([1, 299, 319])), vocab=300)
    matcher = smaller.compiler.compile(Spec(regex="(?s:.*)")).matcher()
    assert not smaller.bits(matcher)[300:].any()
    assert (smaller.bits(matcher)[:299] == bits[:299]).all()
    matcher.advance(299)
    assert matcher.finished


def test_a_stop_token_is_never_text(tiny: Kit) -> None:
    """Several stop tokens, one of them an ordinary token: it ends the output, and is not part of it."""
    letter = tiny.ids("a")[0]
    kit = tiny._replace(compiler=GrammarCompiler(tiny.compiler._folder, tiny.vocab, frozenset([1, letter])))
    matcher = kit.compiler.compile(Spec(regex="[ab]{2}")).matcher()
    assert not kit.bits(matcher)[[1, letter]].any()
    for _ in range(2):
        matcher.advance(kit.ids("b")[0])
    assert set(np.flatnonzero(kit.bits(matcher))) == {1, letter}


def test_compilers_that_cannot_work(tmp_path: Path, embedded: Kit) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        GrammarCompiler(EMBEDDED, 4096, frozenset()).check(Spec(regex="a"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, 4096, frozenset([2])).check(Spec(regex="a"))
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, 4096, frozenset([2])).check(Spec(regex="a"))


def test_compiled_grammars_are_kept_and_bounded() -> None:
    compiler = GrammarCompiler(EMBEDDED, 4096, frozenset([2]))
    first = compiler.compile(Spec(json={"type": "null"}))
    assert compiler.compile(Spec(json={"type": "null"})) is first
    assert compiler.compile(Spec(json={"type": "null"}, disable_any_whitespace=True)) is not first
    assert compiler.compile(Spec(regex="null")) is not compiler.compile(Spec(choice=["null"]))
    for i in range(200):
        compiler.compile(Spec(regex=f"a{i}"))
    assert [len(cache) for cache in compiler._caches.values()] == [128, 0]
    assert compiler.compile(Spec(json={"type": "null"})) is not first


@pytest.mark.parametrize("spec", [{"json": {}}, {"json_object": True}, {"json": {"type": "array"}}])
def test_whitespace_has_an_end(spec: Any, embedded: Kit) -> None:
    """A model that writes whitespace wherever it may comes to an end of it at every place."""
    grammar, blank = embedded.compiler.compile(Spec(**spec)), [*map(embedded.tokenizer.token_to_id, ["Ġ", "Ċ", "ĉ"])]
    for start in ("{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":{', '{"a":[1'):
        if spec == {"json": {"type": "array"}}:
            start = "[" + start
        matcher = grammar.matcher()
        for token in embedded.ids(start):
            matcher.advance(token)
        for count in range(100):
            allowed = [token for token in blank if embedded.bits(matcher)[token]]
            if not allowed:
                break
            matcher.advance(allowed[count % len(allowed)])
        assert 0 < count <= 65, start


def large(count: int) -> dict[str, Any]:
    """A small schema that takes time and memory: each of these doubles them."""
    return {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}b.*)$"} for i in range(5, 5 + count)]}


def test_large_grammars_are_tried_elsewhere_first() -> None:
    compiler = GrammarCompiler(EMBEDDED, 4096, frozenset([2]))
    compiler.check(Spec(json=WRITTEN["invoice"][0]))
    compiler.check(Spec(regex="a"))
    assert compiler._trial._process._process is None  # who never needs the process never starts it
    with pytest.raises(ConfigError, match=r"^structured_outputs\.json: .*regex is empty"):
        compiler.check(Spec(json=large(9)))  # its own verdict comes back
    process = compiler._trial._process._process
    assert process is not None
    usual = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(900)}}
    compiler.check(Spec(json=usual))
    assert compiler._trial._process._process is process
    assert [len(cache) for cache in compiler._caches.values()] == [2, 0]  # it was compiled there only
    compiler.compile(Spec(json=usual))
    assert [len(cache) for cache in compiler._caches.values()] == [2, 1]
    process.kill()
    process.wait()
    compiler.check(Spec(json={**usual, "title": "x"}))  # in another process


@pytest.mark.slow
def test_large_grammars_are_limited() -> None:
    """In time and memory; small ones do not wait for them, and too many are refused."""
    compiler = GrammarCompiler(EMBEDDED, 4096, frozenset([2]))
    compiler.check(Spec(regex="a"))
    before, small = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(compiler.check, Spec(json=large(count))) for count in (22, 40)]
        while not all(future.done() for future in asked):
            compiler.check(Spec(regex=f"a{small}"))
            small += 1
        assert small > 9
        for future in asked:
            with pytest.raises(ConfigError, match=r"takes more than (3 s|512 MiB) to compile; give a simpler one"):
                future.result()
        crowd = [pool.submit(compiler.check, Spec(json=large(20 - i))) for i in range(12)]
        errors = [type(future.exception()) for future in crowd]
    assert errors.count(QueueFullError) == 4
    assert errors.count(ConfigError) == 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_threads(embedded: Kit) -> None:
    """Compiling and matching in several threads gives what one gives."""
    compiler = GrammarCompiler(EMBEDDED, 4096, frozenset([2]))
    items = [(name, schema) for name, (schema, _) in WRITTEN.items()] * 2

    def work(compiler: GrammarCompiler) -> Callable[[tuple[str, Any]], list[int]]:
        return lambda item: sample(
            embedded, compiler.compile(Spec(json=json.dumps(item[1]))), np.random.default_rng(1)
        )[0]

    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(work(compiler), items))
    assert threaded == [work(embedded.compiler)(item) for item in items]
