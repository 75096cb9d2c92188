"""Structured output at the vocabulary of today's models: time to compile a schema, to make a mask, and to take a token.

The tokenizer is a byte-level BPE trained on the source text of the Python installation, or that of a folder. Each of
the hand-written schemas of the tests is compiled by a compiler that has not seen it, then documents are sampled with
random logits: masks and tokens are timed one at a time, as an engine asks for them. A schema that a backend refuses is
left out. Times of steps are processor time of the thread that works; masks of a grammar that a backend keeps are made
in the first ones.
"""

from __future__ import annotations

import json
import runpy
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROOT, Case
from graphllm.config.errors import ConfigError
from graphllm.config.requests.sampling_params import StructuredOutputsParams
from graphllm.engine.structured.compilers import compiler_for

CASES = [("grammar", {"vocab": 151_936, "backend": ("guidance",), "tokenizer": None})]
HELP = {
    "vocab": "tokens of the vocabulary; with --tokenizer the model's",
    "backend": "libraries that make the masks",
    "tokenizer": "folder of a tokenizer.json",
}
PACKAGES = ("tokenizers", "llguidance", "xgrammar", "outlines-core", "lm-format-enforcer")
STOP = 0
DOCUMENTS, STEPS = 4, 64
CORPUS = 48 << 20  # bytes


def run(case: Case) -> dict[str, Any]:
    """Every backend."""
    with tempfile.TemporaryDirectory() as folder:
        place = case.tokenizer or Path(folder)
        if case.tokenizer is None:
            make_tokenizer(place, case.vocab)
        return {backend: measure(backend, place, case.vocab) for backend in case.backend}


def make_tokenizer(folder: Path, vocab: int) -> None:
    """Train one into ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=128,  # as today's models have; llguidance has a limit
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.save(str(folder / "tokenizer.json"))


def corpus() -> Iterator[str]:
    left = CORPUS
    for place in ("stdlib", "purelib"):
        for file in sorted(Path(sysconfig.get_path(place)).rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def written_schemas() -> dict[str, Any]:
    file = ROOT / "tests" / "engine" / "structured" / "schemas.py"
    return {name: schema for name, (schema, _) in runpy.run_path(str(file))["WRITTEN"].items()}


def measure(backend: str, folder: Path, vocab: int) -> dict[str, Any]:
    compiler = compiler_for(backend, folder, vocab, frozenset([STOP]))
    begin = time.perf_counter()
    compiler.compile(StructuredOutputsParams(choice=("a",)))
    first = time.perf_counter() - begin
    random = np.random.default_rng(0)
    row = np.zeros((vocab + 31) // 32, np.int32)
    compiles, masks, advances, clones = [], [], [], []
    refused = 0
    for schema in written_schemas().values():
        params = StructuredOutputsParams(json=json.dumps(schema))
        begin = time.perf_counter()
        try:
            grammar = compiler.compile(params)
        except ConfigError:
            refused += 1
            continue
        compiles.append(time.perf_counter() - begin)
        for _ in range(DOCUMENTS):
            begin = time.thread_time()
            matcher = grammar.matcher()
            clones.append(time.thread_time() - begin)
            for _ in range(STEPS):
                begin = time.thread_time()
                matcher.allow(row)
                masks.append(time.thread_time() - begin)
                allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                token = int(random.choice(allowed))
                begin = time.thread_time()
                matcher.advance(token)
                advances.append(time.thread_time() - begin)
                if matcher.finished:
                    break
    return {
        "load s": round(first, 3),
        "schemas refused": refused,
        "compile ms": spread(compiles, 1e3),
        "matcher us": spread(clones, 1e6),
        "mask us": spread(masks, 1e6),
        "advance us": spread(advances, 1e6),
    }


def spread(seconds: list[float], unit: float) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) * unit
    return {"n": len(seconds), "p50": round(p50, 2), "p99": round(p99, 2), "max": round(max(seconds) * unit, 2)}
