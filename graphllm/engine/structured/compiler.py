"""What compiles constraints and keeps the latest grammars, whatever the backend: its base class, `CachingCompiler`.

A compiler may be called from several threads; a matcher belongs to one request.
"""

from __future__ import annotations

import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.grammar_trial import GrammarTrial
from graphllm.engine.structured.source import GrammarSource, Key, key_of, source_of

if TYPE_CHECKING:
    from graphllm.config.requests.sampling_params import StructuredOutputsParams

T = TypeVar("T")
G = TypeVar("G", bound="Grammar")

_CACHED, _CACHED_LARGE = 128, 8  # compiled grammars kept; of those that may take much memory
# Libraries follow rules that lead to one another, and nested schemas, by recursion: up to 15,000 levels in a text of
# 200,000 characters, for which 64 MiB are enough. The usual stack overflows at 1,000 of them: the end of the process.
STACK_BYTES = 256 << 20
_STACK_LOCK = threading.Lock()  # its size is a setting of the process


class Matcher(Protocol):
    """Where one request's output stands in its grammar. After a GrammarError it is of no more use."""

    @property
    def finished(self) -> bool:
        """Whether a stop token has ended the output."""

    def advance(self, token: int) -> None:
        """Take the next token; a stop token ends the output. Raises GrammarError when it may not come next."""

    def allow(self, row: NDArray[np.int32]) -> None:
        """Write what may come next: bit t % 32 of word t // 32 is 1 for an allowed token t, and 0 for all others.

        row: int32 [ceil(V / 32)] of the model's vocabulary V, contiguous. After the end only stop tokens are allowed.
        Raises GrammarError when no token may come next.
        """

    def rollback(self, tokens: int) -> None:
        """Undo the last ``tokens`` that `advance` took, a stop token among them."""


class Grammar(Protocol):
    """A compiled grammar. Requests share it, each through a matcher of its own."""

    def matcher(self) -> Matcher:
        """One at the start of the output."""


class Prepared(NamedTuple):
    """A constraint in a backend's own form. cheap: certainly to compile, if it is short."""

    form: Any
    cheap: bool = True


class CachingCompiler(ABC, Generic[G]):
    """Compiles what requests ask for with one backend.

    tokenizer_folder: holds ``tokenizer.json``.
    vocab: the model's vocabulary, which sets the size of the masks; the tokenizer may have fewer tokens.
    stop_ids: the tokens that end an output.
    """

    name: ClassVar[str]
    package: ClassVar[str]  # the module that it imports
    fields: ClassVar[frozenset[str]]  # of StructuredOutputsParams that it takes
    # Keywords that it enforces fully, by the kind of a schema (`graphllm.engine.structured.backends.subset`); None: all
    # that `graphllm.engine.structured.schemas.schema` lets through.
    shapes: ClassVar[Mapping[str, frozenset[str]] | None]

    def __init__(self, tokenizer_folder: Path, vocab: int, stop_ids: frozenset[int]) -> None:
        self._folder, self._vocab, self._stop_ids = tokenizer_folder, vocab, stop_ids
        self._trial = GrammarTrial(self.name, tokenizer_folder, vocab, stop_ids)
        # Of cheap ones, and of large ones.
        self._caches: dict[bool, OrderedDict[Key, G]] = {True: OrderedDict(), False: OrderedDict()}
        self._lock = threading.Lock()

    @abstractmethod
    def prepare(self, source: GrammarSource, spec: StructuredOutputsParams) -> Prepared:
        """Raises ConfigError, UnsupportedError for what it cannot do."""

    @abstractmethod
    def build(self, field: str, form: Any, spec: StructuredOutputsParams) -> G:
        """The grammar of what was prepared. Raises ConfigError."""

    def check(self, spec: StructuredOutputsParams) -> None:
        """Raises ConfigError naming the field, what is wrong with it and the remedy, QueueFullError where too many wait
        for an answer. What is not certainly cheap is compiled elsewhere, within limits."""
        source = source_of(spec)
        if self._known(source, spec) is not None:
            return
        prepared = self.prepare(source, spec) if source.cheap else None
        if prepared is not None and prepared.cheap:
            self._add(source, spec, prepared)
        else:
            self._trial.check(source.field, spec)

    def compile(self, spec: StructuredOutputsParams) -> G:
        """The grammar of a request; milliseconds, or nothing when it is known. Without limits, so call `check` first.
        Raises ConfigError like that."""
        source = source_of(spec)
        return self._known(source, spec) or self._add(source, spec, self.prepare(source, spec))

    def _add(self, source: GrammarSource, spec: StructuredOutputsParams, prepared: Prepared) -> G:
        grammar = _on_deep_stack(lambda: self.build(source.field, prepared.form, spec))
        cache = self._caches[source.cheap and prepared.cheap]
        with self._lock:
            cache[key_of(source, spec)] = grammar
            while len(cache) > (_CACHED if cache is self._caches[True] else _CACHED_LARGE):
                cache.popitem(last=False)
        return grammar

    def forget(self) -> None:
        """Compiled grammars are not kept any longer."""
        with self._lock:
            for cache in self._caches.values():
                cache.clear()

    def _known(self, source: GrammarSource, spec: StructuredOutputsParams) -> G | None:
        key = key_of(source, spec)
        with self._lock:
            for cache in self._caches.values():
                if key in cache:
                    cache.move_to_end(key)
                    return cache[key]
        return None

    def usable_stops(self) -> frozenset[int]:
        """The stop tokens that the model has. Raises ConfigError where there is none."""
        stop_ids = frozenset(i for i in self._stop_ids if 0 <= i < self._vocab)
        if not stop_ids:
            raise ConfigError("structured_outputs: the checkpoint names no token that ends output; name one "
                              "as eos_token_id in its generation_config.json")  # fmt: skip
        return stop_ids


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread with a stack that the library cannot overflow; returns or raises as it does."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="graphllm-grammar", daemon=True)
    with _STACK_LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return result.result()
