"""Structured output, the same tests over each backend: what is sampled under its masks is right by the judgement of re
and jsonschema, what is right can be written, and what a backend cannot do is refused with the names of those that can.

A backend whose package is not installed is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import random as python_random
import re
import string
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import StructuredOutputsParams as Spec
from graphllm.config.requests.structured_outputs import BACKENDS
from graphllm.engine.structured.compiler import Grammar
from graphllm.engine.structured.compilers import GrammarCompilers, compiler_class
from graphllm.engine.structured.source import GrammarError, UnsupportedError
from tests.engine.structured.grammar_kit import EMBEDDED, Kit, is_bounded, make_kit, sample, violation
from tests.engine.structured.schemas import WRITTEN, schemas
from tests.tiers import draws

NAMES = [name for name in BACKENDS if name != "auto"]


def installed(backend: str) -> bool:
    return importlib.util.find_spec(compiler_class(backend).package) is not None


@pytest.fixture(scope="module", params=NAMES)
def kit(request: pytest.FixtureRequest) -> Kit:
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return make_kit(EMBEDDED, stop=2, more=0, backend=request.param)


@pytest.fixture(scope="module", params=NAMES)
def padded(request: pytest.FixtureRequest, checkpoint: Path) -> Kit:
    """Of a model whose vocabulary is padded beyond its tokenizer's."""
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return make_kit(checkpoint, stop=1, more=37, backend=request.param)


def writes(kit: Kit, spec: Spec, text: str) -> bool:
    """Whether a text, in the tokenizer's own tokens, can be an output; masks and tokens are asked alike."""
    matcher = kit.compiler.compile(spec).matcher()
    for token in [*kit.ids(text), kit.stop]:
        allowed = bool(kit.bits(matcher)[token])
        try:
            matcher.advance(token)
        except GrammarError:
            assert not allowed
            return False
        assert allowed
    return bool(matcher.finished)


def texts(kit: Kit, spec: Spec, count: int) -> list[str]:
    """Outputs of random logits that came to an end."""
    grammar, random = kit.compiler.compile(spec), np.random.default_rng(1)
    outputs = [sample(kit, grammar, random) for _ in range(count)]
    ended = [kit.text(tokens) for tokens, end in outputs if end]
    assert len(ended) >= 0.8 * count
    return ended


CHOICES = ["red", "reddish", "re", 'with "quotes"', "two\nlines", "C:\\x", "a|b.c*(d)[e]{2}^$", "^", "-"]


def test_choice(kit: Kit) -> None:
    spec = Spec(choice=CHOICES)
    assert set(texts(kit, spec, 200)) == set(CHOICES)
    for choice in CHOICES:
        assert writes(kit, spec, choice)
        assert not writes(kit, spec, choice + "x")


REGEXES = {
    "[a-z]{3}-[0-9]{2,4}": (["abc-12", "abc-1234"], ["abc-1", "ab-12", "abc-12345"]),
    "(yes|no|maybe)": (["yes", "maybe"], ["yesno", ""]),
    "^abc$": (["abc"], ["abcc"]),
    "a*b+?c?": (["b", "aabbc"], ["a", "c"]),
    r"\d{4}-\d\d": (["2026-01"], ["2026-1", "٣٣٣٣-٣٣"]),
    r"[A-Z]\w{0,5}( \w{1,3})*": (["Ab_1 x y"], ["ab", "A "]),
    r"\(\d{3}\) \d{3}-\d{4}": (["(123) 456-7890"], ["123 456-7890"]),
    r"[^\n]{2,4}": (["a b", "[]^-"], ["a\nb", "abcde"]),
    "": ([""], ["a"]),
    "(a|)": (["", "a"], ["aa"]),
    "(?:c?|ab)": (["", "c", "ab"], ["a", "cab"]),
    "(a[ab])+": (["aa", "aaab"], ["aaa"]),
    "(?:(?:a{1,3}){2})?": (["", "aa", "aaaaaa"], ["a", "aaaaaaa"]),
    "(?P<x>ab)|c": (["ab", "c"], ["abc"]),
    r"[\^a]+\.[^\^]": (["^a.b"], ["^a.^", "b.b"]),
    r"[\x00-\x1fab]?[\s]": (["a\n", " "], ["c "]),
    r"\u0041[]-]": (["A]", "A-"], ["A", "B]"]),
}  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_regex(regex: str, kit: Kit) -> None:
    good, bad = REGEXES[regex]
    for text in texts(kit, Spec(regex=regex), 10):
        assert re.fullmatch(regex, text)
    for text in good + bad:
        assert bool(re.fullmatch(regex, text, re.ASCII)) == (text in good)  # the test's own examples
        assert writes(kit, Spec(regex=regex), text) == (text in good), text


def _expression(random: python_random.Random, depth: int) -> str:
    kind = random.random()
    if depth == 0 or kind < 0.3:
        return random.choice(["a", "b", "c", "[ab]", "[^a]"])
    if kind < 0.55:
        return _expression(random, depth - 1) + _expression(random, depth - 1)
    if kind < 0.7:
        return f"(?:{_expression(random, depth - 1)}|{_expression(random, depth - 1)})"
    return f"({_expression(random, depth - 1)})" + random.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"])


def test_all_short_texts_of_random_expressions(kit: Kit) -> None:
    random = python_random.Random(3)
    ids = {c: kit.ids(c)[0] for c in "abc"}
    short = ["".join(s) for n in range(5) for s in itertools.product("abc", repeat=n)]
    for _ in range(12):
        regex = _expression(random, 3)
        grammar, found = kit.compiler.compile(Spec(regex=regex)), set()
        for text in short:
            matcher = grammar.matcher()
            try:
                for token in [*(ids[c] for c in text), kit.stop]:
                    matcher.advance(token)
            except GrammarError:
                continue
            found.add(text)
        assert found == {text for text in short if re.fullmatch(regex, text)}, regex


def test_every_character_in_an_expression(kit: Kit) -> None:
    for c in string.punctuation + " ~\t\n\x7f":
        for regex in (f"{re.escape(c)}a", f"[{re.escape(c)}]a", f"[b{re.escape(c)}]a"):
            assert writes(kit, Spec(regex=regex), f"{c}a"), regex
            assert not writes(kit, Spec(regex=regex), f"{'a' if c == 'b' else 'c'}a"), regex


NEVER = ["(?=a)b", "(?!a)b", "(?<=a)b", r"(a)\1", r"a\bb", "a++", "(?>a)", "(", "a)", "a{3,2}", "[b-a]", "*a"]


@pytest.mark.parametrize("regex", NEVER)
def test_expressions_that_no_backend_takes(regex: str, kit: Kit) -> None:
    with pytest.raises(ConfigError, match=r"^structured_outputs\.regex: ") as refusal:
        kit.compiler.compile(Spec(regex=regex))
    assert "use the backend" not in str(refusal.value)


def taken(kit: Kit, spec: Spec) -> Grammar | None:
    """The grammar of a schema; None where the backend refuses it."""
    try:
        return kit.compiler.compile(spec)
    except ConfigError as e:
        refusal = e
    assert str(refusal).startswith("structured_outputs.json: ")
    return None


# Of these, some examples are nested deeper than the others write, or are of a type that the schema does not name.
NARROWER = ("anything", "any object", "true", "dates")


@pytest.mark.parametrize("name", WRITTEN)
def test_documents_of_a_schema(name: str, kit: Kit) -> None:
    """Each schema is refused, or what is written satisfies it, with what people write of it among that."""
    schema, examples = WRITTEN[name]
    narrower = name in NARROWER and kit.compiler.name != "guidance"
    specs = [Spec(json=json.dumps(schema), disable_any_whitespace=dense) for dense in (False, True)]
    for spec in specs:
        grammar = taken(kit, spec)
        assert grammar or kit.compiler.name != "guidance"
        if grammar is None:
            continue
        random, ended = np.random.default_rng(0), 0
        for _ in range(4):
            tokens, end = sample(kit, grammar, random)
            ended += end
            assert not end or violation(schema, kit.text(tokens)) is None, kit.text(tokens)
        assert ended or kit.compiler.name == "guidance"
        for example in examples:
            text = json.dumps(example, ensure_ascii=False, separators=(",", ":"))
            spaced = json.dumps(example, ensure_ascii=False)
            assert not text.isascii() or narrower or writes(kit, spec, text), text
            assert not (spec.disable_any_whitespace and text != spaced and writes(kit, spec, spaced))


TAKEN = {"guidance": len(WRITTEN), "xgrammar": 36, "outlines": 24, "lm-format-enforcer": 23}


def test_how_much_is_taken(kit: Kit) -> None:
    """Of the schemas that are written by hand; a backend that refuses all would pass the other tests."""
    grammars = [taken(kit, Spec(json=json.dumps(schema))) for schema, _ in WRITTEN.values()]
    assert sum(grammar is not None for grammar in grammars) >= TAKEN[kit.compiler.name]


def test_what_people_ask_for_is_taken(kit: Kit) -> None:
    """These, by every backend: an object of strings, numbers, choices, lists, objects, and what may be missing."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "kind": {"enum": ["person", "place", None, 3]},
            "day": {"type": "string", "format": "date"},
            "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
            "score": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
            "at": {"$ref": "#/$defs/point"},
            "more": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#/$defs/point"}}]},
        },
        "required": ["name", "kind", "day", "zip", "score", "tags", "at"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    }
    for text in texts(kit, Spec(json=schema), 5):
        assert violation(schema, text) is None, text
    document = {"name": 'a"\\', "kind": 3, "day": "2024-02-29", "zip": "12345", "score": -1.5e3, "tags": ["x"],
                "at": {"x": 0}, "more": [{"x": 1, "y": 2}]}  # fmt: skip
    assert violation(schema, json.dumps(document)) is None
    assert writes(kit, Spec(json=schema), json.dumps(document))
    for change in ({"day": "2023-02-29"}, {"zip": "1234"}, {"tags": []}, {"kind": "thing"}, {"name": ""}, {"at": {}}):
        assert not writes(kit, Spec(json=schema), json.dumps(document | change)), change


def test_documents_of_generated_schemas(kit: Kit) -> None:
    compiled = 0

    @settings(
        max_examples=draws(10, 60),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas(), st.integers(0, 2**32))
    def check(schema: Any, seed: int) -> None:
        nonlocal compiled
        grammar = taken(kit, Spec(json=json.dumps(schema)))
        assume(grammar is not None)  # what is drawn depends on the modules that were imported: draw until enough are
        assert grammar is not None
        compiled += 1
        tokens, ended = sample(kit, grammar, np.random.default_rng(seed))
        assert not ended or violation(schema, kit.text(tokens)) is None

    check()
    assert compiled >= 10


def test_any_object(kit: Kit) -> None:
    for spec in (Spec(json_object=True), Spec(json_object=True, disable_any_whitespace=True)):
        for text in texts(kit, spec, 10):
            assert isinstance(json.loads(text), dict)
            assert spec.disable_any_whitespace is False or " " not in re.sub(r'"(\\.|[^"\\])*"', "", text)
    for text in ("{}", '{"a": [1, "b"], "c": {"d": null}}'):
        assert writes(kit, Spec(json_object=True), text)
    for text in ("[]", "1", '{"a":1,}', '{"a":01}', "{'a':1}", '{"a":"\n"}', '{"a":1.e5}'):
        assert not writes(kit, Spec(json_object=True), text)


GBNF = 'root ::= "(" root ")" | [0-9]+ (", " [0-9]+)*\n'


def test_grammar(kit: Kit) -> None:
    if "grammar" not in kit.compiler.fields:
        with pytest.raises(UnsupportedError):
            kit.compiler.compile(Spec(grammar=GBNF))
        return
    for text in texts(kit, Spec(grammar=GBNF), 10):
        inner = text.strip("()")
        assert re.fullmatch(r"[0-9]+(, [0-9]+)*", inner)
        assert text == "(" * (text.count("(")) + inner + ")" * text.count("(")
    for text in ("1", "((12, 3))"):
        assert writes(kit, Spec(grammar=GBNF), text)
        assert not writes(kit, Spec(grammar=GBNF), text + ")")
    for wrong in ("root ::= missing\n", 'root ::= "a\n'):
        with pytest.raises(ConfigError, match=r"^structured_outputs\.grammar: "):
            kit.compiler.compile(Spec(grammar=wrong))


def test_rollback(kit: Kit) -> None:
    """Going back gives the masks of before, from within the output and from behind its end."""
    for spec in (Spec(regex="(ab|ac){2,9}"), Spec(json={"type": "array", "items": {"type": "integer"}})):
        matcher, masks = kit.compiler.compile(spec).matcher(), []
        text = "abacab" if spec.regex else "[12, 345]"
        tokens = [*kit.ids(text), kit.stop]
        for token in tokens:
            masks.append(kit.bits(matcher))
            matcher.advance(token)
        for length in (1, 2, 4, len(tokens)):
            matcher.rollback(length)
            assert not matcher.finished
            assert (kit.bits(matcher) == masks[len(tokens) - length]).all()
            for token in tokens[-length:]:
                matcher.advance(token)
            assert matcher.finished
        matcher.rollback(0)
        assert matcher.finished


def test_end_of_output(kit: Kit) -> None:
    """Stop tokens are allowed where the text may end, and nothing else behind it."""
    matcher = kit.compiler.compile(Spec(regex="ab?")).matcher()
    assert not kit.bits(matcher)[kit.stop]
    for token in (kit.stop, 0, -1, 10**12, kit.ids("b")[0]):
        with pytest.raises(GrammarError, match=r"\w"):
            kit.compiler.compile(Spec(regex="ab?")).matcher().advance(token)
    matcher.advance(kit.ids("a")[0])
    assert {kit.stop, kit.ids("b")[0]} == set(np.flatnonzero(kit.bits(matcher)))
    matcher.advance(kit.stop)
    assert matcher.finished
    assert np.flatnonzero(kit.bits(matcher)).tolist() == [kit.stop]
    with pytest.raises(GrammarError, match="after the end"):
        matcher.advance(kit.stop)


def test_masks_of_a_padded_vocabulary(padded: Kit) -> None:
    """Whole characters, the stop token, and nothing special nor of the padding."""
    size = padded.tokenizer.get_vocab_size()
    special = {padded.tokenizer.token_to_id(t) for t in ("<s>", "</s>", "<|user|>", "<|system|>", "<|bot|>")}
    matcher = padded.compiler.compile(Spec(regex="[^ξ]*")).matcher()
    bits = padded.bits(matcher)
    whole = [i not in special and "\ufffd" not in padded.tokenizer.decode([i]) for i in range(size)]
    assert bits[:size][whole].all()
    assert bits[padded.stop]
    assert not bits[list(special - {padded.stop})].any()
    assert not bits[size:].any()
    letter = padded.ids("a")[0]
    two = compiler_class(padded.compiler.name)(padded.compiler._folder, padded.vocab, frozenset([1, letter]))
    matcher = two.compile(Spec(regex="[ab]")).matcher()
    assert not padded.bits(matcher)[[1, letter]].any()  # a stop token is never text
    matcher.advance(padded.ids("b")[0])
    assert set(np.flatnonzero(padded.bits(matcher))) == {1, letter}


def test_requests_share_a_grammar(kit: Kit) -> None:
    """Two matchers of one grammar do not see each other's tokens."""
    grammar = kit.compiler.compile(Spec(regex="ab|cd"))
    one, two = grammar.matcher(), grammar.matcher()
    one.advance(kit.ids("a")[0])
    two.advance(kit.ids("c")[0])
    assert np.flatnonzero(kit.bits(one)).tolist() == kit.ids("b")
    assert np.flatnonzero(kit.bits(two)).tolist() == kit.ids("d")
    assert kit.compiler.compile(Spec(regex="ab|cd")) is grammar


def test_threads(kit: Kit) -> None:
    """Compiling and matching in several threads gives what one gives."""
    specs = [Spec(regex=regex) for regex in REGEXES] * 2 + [Spec(json={"enum": [i, "a"]}) for i in range(8)]

    def work(compiler: Any) -> Callable[[Spec], list[int]]:
        return lambda spec: sample(kit, compiler.compile(spec), np.random.default_rng(1))[0]

    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(work(compiler_class(kit.compiler.name)(EMBEDDED, 4096, frozenset([2]))), specs))
    assert threaded == [work(kit.compiler)(spec) for spec in specs]


def test_what_may_be_large_is_compiled_elsewhere_first(kit: Kit) -> None:
    compiler = compiler_class(kit.compiler.name)(EMBEDDED, 4096, frozenset([2]))
    compiler.check(Spec(choice=["a", "b"]))
    assert compiler._trial._process._process is None
    for spec in (Spec(json=WRITTEN["union of types"][0]), Spec(regex="[a-z]{3,9}x")):
        compiler.check(spec)
    with pytest.raises(ConfigError, match=r"^structured_outputs\.regex: "):
        compiler.check(Spec(regex="(?=a)" + "b" * 20_000))
    assert compiler.name == "guidance" or compiler._trial._process._process is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "regex", ["((a{0,20}){0,20}){0,20}", "((a{0,99}){0,99}){0,99}", "(.*a){40}", "(a|b)*a(a|b){500}", "[a-z]*" * 300]
)
def test_exploding_expressions_take_bounded_time(regex: str, kit: Kit) -> None:
    with contextlib.suppress(ConfigError):
        kit.compiler.check(Spec(regex=regex))
        assert is_bounded(kit, regex)


REFUSALS = [
    ("lm-format-enforcer", Spec(json={"type": "integer", "minimum": 3}), "#: minimum", ["guidance", "xgrammar"]),
    ("outlines", Spec(json={"properties": {"a": {"type": "number", "multipleOf": 2}}}), "multipleOf", ["guidance"]),
    ("outlines", Spec(json=WRITTEN["tree"][0]), r"\$ref is not supported", ["guidance", "xgrammar"]),
    ("outlines", Spec(json={"type": "string", "format": "ipv4"}), "format", ["guidance"]),
    ("xgrammar", Spec(json={"type": "object", "patternProperties": {"^a$": {}}}), "patternProperties", ["guidance"]),
    ("xgrammar", Spec(json={"allOf": [{"type": "integer", "minimum": 1}, {"minimum": 2}]}), "allOf", ["guidance"]),
    ("xgrammar", Spec(grammar='start: "a"'), "Lark syntax", ["guidance"]),
    ("lm-format-enforcer", Spec(grammar=GBNF), "context-free grammar", ["guidance", "xgrammar"]),
    ("outlines", Spec(json_object=True, whitespace_pattern=" "), "pattern of whitespace", ["guidance"]),
    ("outlines", Spec(regex=r"\p{L}+"), r"\\p", ["guidance"]),
    ("xgrammar", Spec(regex="(?i)a"), r"\(\?i", ["guidance"]),
    ("lm-format-enforcer", Spec(regex=r"a(?!b)"), r"\(\?!", []),
]


@pytest.mark.parametrize(("backend", "spec", "named", "able"), REFUSALS)
def test_a_refusal_names_the_backends_that_can(backend: str, spec: Spec, named: str, able: list[str]) -> None:
    """And they do."""
    if not installed(backend):
        pytest.skip(f"{backend} is not installed")
    compilers = GrammarCompilers(EMBEDDED, 4096, frozenset([2]), backend)
    with pytest.raises(ConfigError, match=named) as refusal:
        compilers.check(spec)
    message = str(refusal.value)
    assert re.search(rf"not supported by {backend}\b", message)
    assert f"use the backend {' or '.join(able)}," in message if able else "use the backend" not in message
    for other in filter(installed, able):
        compilers.compile(_with_backend(spec, other))


def _with_backend(spec: Spec, backend: str) -> Spec:
    given = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return Spec(**given | {"backend": backend})


def test_requests_choose_their_backend() -> None:
    """The engine's own where they do not say; a package that is missing is named with its extra."""
    compilers = GrammarCompilers(EMBEDDED, 4096, frozenset([2]))
    usual = compilers.compile(Spec(regex="ab"))
    assert compilers.compile(Spec(regex="ab", backend="auto")) is usual
    assert compilers.compile(Spec(regex="ab", backend="guidance")) is usual
    for backend in NAMES[1:]:
        if installed(backend):
            assert type(compilers.compile(Spec(regex="ab", backend=backend))) is not type(usual)
    with pytest.raises(
        ConfigError, match=r"structured_outputs\.backend is 'yacc': give one of auto, guidance, xgrammar"
    ):
        Spec(regex="a", backend="yacc")


@pytest.mark.parametrize("backend", NAMES[1:])
def test_a_missing_package_is_named_with_its_extra(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, find = compiler_class(backend).package, importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    remedy = f" is '{backend}': the package {package} is not installed; " + re.escape(
        f"run pip install 'graphllm[{backend}]'"
    )
    with pytest.raises(ConfigError, match=f"^structured_outputs_backend{remedy}"):
        GrammarCompilers(EMBEDDED, 4096, frozenset([2]), backend)
    compilers = GrammarCompilers(EMBEDDED, 4096, frozenset([2]))
    with pytest.raises(ConfigError, match=rf"^structured_outputs\.backend{remedy}"):
        compilers.check(Spec(regex="a", backend=backend))


@pytest.mark.parametrize("backend", NAMES)
def test_an_engine_of_a_backend(backend: str, checkpoint: Path, eager_artifact: Path) -> None:
    """Requests without a choice get the engine's, others their own; what it refuses is a mistake of the request."""
    if not installed(backend):
        pytest.skip(f"{backend} is not installed")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {
        r'\{ ?"a" ?: ?(true|false) ?\}': Spec(json=schema, disable_any_whitespace=True),
        "red|green": Spec(choice=("red", "green")),
        "[a-f]{4}-[0-9]{2}": Spec(regex="[a-f]{4}-[0-9]{2}"),
        "ab?": Spec(regex="ab?", backend="guidance"),
    }
    with LLM(checkpoint, artifact=str(eager_artifact), structured_outputs_backend=backend) as llm:
        for temperature in (0.0, 1.0):
            params = [
                SamplingParams(max_tokens=40, temperature=temperature, seed=1, structured_outputs=s)
                for s in wanted.values()
            ]
            outputs = llm.generate(["hello world"] * len(params), params)
            for pattern, output in zip(wanted, outputs, strict=True):
                assert re.fullmatch(pattern, output.outputs[0].text), (pattern, output.outputs[0].text)
                assert output.outputs[0].finish_reason == "stop"
        with pytest.raises(ConfigError, match=r"structured_outputs\.regex"):
            llm.generate(["x"], SamplingParams(structured_outputs=Spec(regex="(?=a)b")))
