"""For tests of structured output: a tokenizer with its compiler, outputs sampled from random logits under the masks,
and what is wrong with them by the judgement of jsonschema."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

import graphllm.embedded
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import StructuredOutputsParams
from graphllm.engine.structured.compiler import Grammar
from graphllm.engine.structured.compilers import compiler_for
from graphllm.engine.structured.source import GrammarError

EMBEDDED = Path(graphllm.embedded.__file__).parent / "model"
FREE, CAP = 40, 500  # tokens sampled freely, then towards an end


class Kit(NamedTuple):
    """A tokenizer, a compiler, and for each token how well it leads to the end of a document (0 is best)."""

    tokenizer: tokenizers.Tokenizer
    compiler: Any
    vocab: int
    stop: int
    rank: np.ndarray

    def bits(self, matcher: Any) -> np.ndarray:
        """Allowed tokens as booleans, over all bits of the row."""
        row = np.full((self.vocab + 31) // 32, -1, np.int32)
        matcher.allow(row)
        return np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def make_kit(folder: Path, stop: int, more: int, backend: str = "auto") -> Kit:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    rank = np.full(size + more, 4)
    for i, text in enumerate(texts):
        for place, chars in enumerate(('"}]', "@:,.-*/")):
            if text and set(text) <= set(chars):
                rank[i] = min(rank[i], place + 1)
        if text.isalnum() and text.isascii() and len(text) <= 2:
            rank[i] = 3
    rank[stop] = 0
    compiler = compiler_for(backend, folder, size + more, frozenset([stop]))
    return Kit(tokenizer, compiler, size + more, stop, rank)


def sample(kit: Kit, grammar: Grammar, random: np.random.Generator) -> tuple[list[int], bool]:
    """The tokens of one output without the stop token, from random logits; and whether it came to an end."""
    matcher, tokens = grammar.matcher(), []
    for step in range(CAP):
        allowed = np.flatnonzero(kit.bits(matcher))
        if step >= FREE:
            best = kit.rank[allowed]
            allowed = allowed[best == best.min()]
        token = int(allowed[random.random(allowed.size).argmax()])
        matcher.advance(token)
        if token == kit.stop:
            assert matcher.finished
            return tokens, True
        tokens.append(token)
    return tokens, False


def _multiple(validator: Any, step: Decimal | int, value: Any, schema: Any) -> Iterator[ValidationError]:
    """In fractions: jsonschema's own cannot divide a float, which a number with an exponent is here, by a decimal."""
    finite = validator.is_type(value, "number") and math.isfinite(value)
    if finite and Fraction(value) % Fraction(step):
        yield ValidationError(f"{value} is no multiple of {step}")


Exact = extend(Draft202012Validator, {"multipleOf": _multiple})


def violation(schema: Any, text: str) -> str | None:
    """What jsonschema finds wrong with a document. In decimals: floats round 9.99999999999999999 up to 10."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:  # no supported bound lets an exponent through
        document = json.loads(text, parse_float=lambda n: float(n) if "e" in n.lower() else Decimal(n))
    except ValueError as e:
        return str(e)
    with localcontext(prec=2000, Emax=10**9, Emin=-(10**9)):
        checker = Exact(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
        return next((e.message for e in checker.iter_errors(document)), None)


def is_bounded(kit: Kit, regex: str) -> bool:
    """Whether it takes no more than ten thousand times the CPU seconds of a plain expression to compile it and to make
    20 tokens of it, or to refuse it."""
    return _cpu_seconds(kit, regex) < 10_000 * max(_cpu_seconds(kit, "x" * length) for length in (997, 998, 999))


def _cpu_seconds(kit: Kit, regex: str) -> float:
    begun = time.process_time()
    with contextlib.suppress(ConfigError, GrammarError):
        matcher = kit.compiler.compile(StructuredOutputsParams(regex=regex)).matcher()
        for _ in range(20):
            matcher.advance(int(np.flatnonzero(kit.bits(matcher))[-1]))
            if matcher.finished:
                break
    return time.process_time() - begun
