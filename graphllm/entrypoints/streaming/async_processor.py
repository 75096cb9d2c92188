"""`Processor` for an event loop: texts and grammars that take a while are worked on in threads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.process.limited_process import MAX_WAITING
from graphllm.engine.requests.processor import ParsedRequest, Processor, Prompt
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.requests.text_length import PIECE, encode_at_most
from graphllm.engine.vectors.pooling import Pair

_LONG = 4096  # characters of a text above which it is tokenized in a thread
_T = TypeVar("_T")


class LongTexts:
    """Tokenizes texts in threads. All long texts share one thread and take turns at each piece."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "long-texts")

    async def token_ids(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of any text. Raises ConfigError for one with far more than ``limit``."""
        if self._tokenizer is None:
            raise ConfigError("tokenizer: there is none; leave out skip_tokenizer_init, or work with token ids")
        return await self.last(text, encode_at_most(self._tokenizer, text, limit, add_special_tokens))

    async def last(self, text: str, steps: Iterator[list[int] | None]) -> list[int]:
        """The last of the steps of ``text``, each in a thread; no other step runs once this is cancelled."""
        executor = self._thread if len(text) > PIECE else None
        while (ids := await asyncio.get_running_loop().run_in_executor(executor, next, steps)) is None:
            pass
        return ids

    async def of_pair(self, pair: Pair, make: Callable[[Pair], _T]) -> _T:
        """What ``make`` makes of a pair of texts; in the thread if one of them is long."""
        if max(len(text) for text in pair if isinstance(text, str)) > _LONG:
            return await asyncio.get_running_loop().run_in_executor(self._thread, make, pair)
        return make(pair)

    def close(self) -> None:
        """Drop texts that wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class AsyncProcessor:
    """Makes requests of prompts. processor: does the work. texts: tokenizes long prompts."""

    def __init__(self, processor: Processor, texts: LongTexts) -> None:
        self._processor, self._texts = processor, texts
        # More threads than can wait for the check of a large grammar, so that other requests never wait.
        self._parsers = ThreadPoolExecutor(2 * MAX_WAITING, "graphllm-parse")

    async def make(self, prompt: Prompt, params: SamplingParams, name: str, **options: Any) -> ParsedRequest:
        """A request. name: the core's of it. options: of `Processor.make`. Raises ConfigError for one that cannot
        run."""
        prompt = await self.tokenized(prompt)
        make = functools.partial(self._processor.make, prompt, params, name, **options)
        if params.structured_outputs is None and not params.bad_words:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._parsers, make)

    async def tokenized(self, prompt: Prompt) -> Prompt:
        """A prompt with its token ids, if it is text that takes a while to tokenize; else as it is. Raises ConfigError
        for one that is far too long."""
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text = fields.get("prompt")
        if not isinstance(text, str) or len(text) <= _LONG or fields.get("prompt_token_ids") is not None:
            return prompt
        steps = self._processor.encode(text, fields.get("add_special_tokens", True), "truncation" in fields)
        return {**fields, "prompt_token_ids": await self._texts.last(text, steps)}
