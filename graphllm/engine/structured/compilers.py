"""What outputs are held to: `compiler_for` a backend's name, and `GrammarCompilers`, which asks each request."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graphllm.config import ConfigError
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.structured.bad_words import BadWords, TokenTexts
from graphllm.engine.structured.compiler import CachingCompiler, Grammar
from graphllm.engine.structured.source import UnsupportedError

if TYPE_CHECKING:
    from graphllm.config.requests.sampling_params import SamplingParams, StructuredOutputsParams

T = TypeVar("T")
Compiler = CachingCompiler[Any]

# In the order in which they are named to people. A file imports its library when it is used.
_CLASSES = {
    "guidance": "graphllm.engine.structured.backends.llguidance:GrammarCompiler",
    "xgrammar": "graphllm.engine.structured.backends.xgrammar:XGrammarCompiler",
    "outlines": "graphllm.engine.structured.backends.outlines:OutlinesCompiler",
    "lm-format-enforcer": "graphllm.engine.structured.backends.lm_format_enforcer:LMFormatEnforcerCompiler",
}
_AUTO = "guidance"


def compiler_class(backend: str) -> type[Compiler]:
    """Of a backend's name, "auto" for the usual one."""
    module, name = _CLASSES[_AUTO if backend == "auto" else backend].split(":")
    made: type[Compiler] = getattr(importlib.import_module(module), name)
    return made


def compiler_for(
    backend: str, folder: Path, vocab: int, stop_ids: frozenset[int], asked: str = "structured_outputs.backend"
) -> Compiler:
    """asked: the field that names the backend. Raises ConfigError where its package is not installed."""
    made = compiler_class(backend)
    if importlib.util.find_spec(made.package) is None:
        raise ConfigError(
            f"{asked} is {backend!r}: the package {made.package} is not installed; run "
            f"pip install 'graphllm[{made.name}]', or use another backend"
        )
    return made(folder, vocab, stop_ids)


class GrammarCompilers:
    """Compiles each constraint with the backend that it names. The others are as for `CachingCompiler`.

    backend: of constraints that name none; it is made at once, so that a missing package shows. Raises ConfigError.
    """

    def __init__(self, folder: Path, vocab: int, stop_ids: frozenset[int], backend: str = "auto") -> None:
        self._place = folder, vocab, stop_ids
        self._lock = threading.Lock()
        self._made: dict[type[Compiler], Compiler] = {}
        self._known: TokenTexts | None = None
        self._usual = self._of(backend, "structured_outputs_backend")

    def check(self, spec: StructuredOutputsParams) -> None:
        """Raises ConfigError, QueueFullError (`CachingCompiler.check`)."""
        self._with(spec, lambda compiler: compiler.check(spec))

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """Raises ConfigError (`CachingCompiler.compile`)."""
        grammar: Grammar = self._with(spec, lambda compiler: compiler.compile(spec))
        return grammar

    def constraints(self, params: SamplingParams) -> tuple[Grammar | None, BadWords | None]:
        """What a request's output is held to. Raises ConfigError (`CachingCompiler.compile`)."""
        spec, words = params.structured_outputs, params.bad_words
        return None if spec is None else self.compile(spec), BadWords(self._texts(), words) if words else None

    def _texts(self) -> TokenTexts:
        folder, vocab, _ = self._place
        with self._lock:
            self._known = self._known or TokenTexts.of(Tokenizer.from_folder(folder), vocab)
            return self._known

    def forget(self) -> None:
        """Compiled grammars are not kept any longer."""
        for compiler in self._made.values():
            compiler.forget()

    def _with(self, spec: StructuredOutputsParams, work: Callable[[Compiler], T]) -> T:
        if spec.calls is not None:  # which have tokens among their text
            compiler = self._of(_AUTO)
        else:
            compiler = self._usual if spec.backend is None else self._of(spec.backend)
        try:
            return work(compiler)
        except UnsupportedError as e:
            able = tuple(name for name in _CLASSES if name != compiler.name and _does(compiler_class(name), e))
            raise ConfigError(e.message_for(compiler.name, able)) from e

    def _of(self, backend: str, asked: str = "structured_outputs.backend") -> Compiler:
        with self._lock:
            wanted = compiler_class(backend)
            if wanted not in self._made:
                self._made[wanted] = compiler_for(backend, *self._place, asked)
            return self._made[wanted]


def _does(backend: type[Compiler], missing: UnsupportedError) -> bool:
    """Whether another backend takes what one has refused."""
    if missing.kind == "field":
        return missing.field in backend.fields
    if missing.kind == "never":
        return False
    if backend.shapes is None or not missing.kind:
        return backend.shapes is None
    if missing.kind == "recursion":
        return "recursion" in backend.shapes["$ref"]
    return missing.what in backend.shapes.get(missing.kind, ())
